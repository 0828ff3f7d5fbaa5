"""One run from its validated config: the plan, the training, the summary. What ``verl train`` does."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from verl.common.errors import ConfigError, DataError, VerlError
from verl.observe.comparison import load_runs, panel_keys, print_comparison
from verl.observe.curve import reward_curve_png
from verl.observe.history import METRICS_FILE, load_metrics
from verl.observe.keys import CURVES
from verl.observe.report import curve_key, print_report
from verl.trainer.base_sections import Run
from verl.trainer.families import trainer_class
from verl.trainer.placement import serve_rank_0
from verl.trainer.resume import prepare_folder
from verl.trainer.run_loop import RunResult

SMALL_MODEL_PARAMETERS = 1_000_000

log = logging.getLogger(__name__)


def plan(config: Run) -> str:
    """The effective config as YAML and, below it, what it comes to. Loads tokenizer, data and reward, but no model."""
    lines = [*trainer_class(config).plan(config), f"output: {config.trainer.output_dir}"]
    return config.as_yaml() + "\n".join(f"# {line}" for line in lines)


def train_run(config: Run) -> int:
    """Train and print the summary. Returns the exit code: 0, or 128 + signal after an interrupt.

    Ranks of torchrun other than 0 serve and leave by SystemExit(0).
    """
    serve_rank_0()
    folder = config.trainer.output_dir.absolute()  # wherever a reward may change the working folder to
    prepare_folder(config.trainer)
    with _log_file(folder):
        try:
            trainer = trainer_class(config).from_config(config)
        except VerlError:
            if not config.trainer.is_set("output_dir"):  # a new name for each start: nobody else is in it
                shutil.rmtree(folder)
            raise
        roles = trainer.parts.roles
        use_one_thread_where_more_would_wait(roles.device, roles.shape.active_parameters)
        try:
            result: RunResult = trainer.run()
        finally:
            trainer.close()
    if result.steps:
        report([folder])
    return result.exit_code


def use_one_thread_where_more_would_wait(device: torch.device, active_parameters: int) -> None:
    """On a CPU, a small model's operations are shorter than the hand-over between threads.

    Two threads gain nothing there, and lose several times over when another process wants the cores. A user's
    OMP_NUM_THREADS stands.
    """
    if device.type == "cpu" and active_parameters < SMALL_MODEL_PARAMETERS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def report(runs: Sequence[Path], picture: Path | None = None) -> None:
    """Print the summary of one run, or a table of several; draw their curves in ``picture``.

    Without ``picture`` the curve of one run is drawn in its folder, as ``reward.png`` the reward's, where matplotlib is
    there for it; of several runs none is.
    Raises, before anything is printed, DataError for a folder without a finished step, ConfigError for a ``picture``
    that can't be written, MissingExtra for one without matplotlib.
    """
    folders = [run.parent if run.name == METRICS_FILE else run for run in runs]
    loaded = load_runs(folders)
    if picture is not None:
        keys = panel_keys(loaded)
        if not keys:
            raise DataError(f"nothing to draw: no step of {', '.join(loaded)} has any of {', '.join(CURVES)}")
        try:
            log.info("curves drawn in %s", reward_curve_png(loaded, picture, keys))
        except ConfigError as error:
            raise ConfigError(f"--png {str(picture)!r}: {error}") from error
        except OSError as error:
            raise ConfigError(f"--png {str(picture)!r} can't be written: {error.strerror or error}") from error
    if len(loaded) > 1:
        print_comparison(loaded)
        return
    print_report(folders[0])
    if picture is None:
        _draw_in_folder(folders[0])


def _draw_in_folder(folder: Path) -> None:
    key = curve_key(load_metrics(folder))
    if key is None:
        return
    if find_spec("matplotlib") is None:
        log.info("no picture of the curve: pip install 'verl[plot]'")
        return
    try:
        log.info("curve drawn in %s", reward_curve_png(folder, folder / f"{CURVES[key]}.png", [key]))
    except OSError as error:
        log.warning("no picture of the curve: %s can't be written: %s", folder / f"{CURVES[key]}.png", error)


@contextmanager
def _log_file(folder: Path) -> Iterator[None]:
    """Copies this library's log lines to ``logs/run.log`` of the run, and the error that ends it."""
    path = folder / "logs" / "run.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("verl").addHandler(handler)
    try:
        yield
    except VerlError as error:  # the command prints it, so it goes into the file alone
        handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "%s", (error,), None))
        raise
    finally:
        logging.getLogger("verl").removeHandler(handler)
        handler.close()
