"""The command line: parses words, calls one function a command, prints what came of it.

Heavy imports happen inside the commands, so that help is quick.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from verl import __version__
from verl.common.collector import exit_without_collecting
from verl.common.errors import VerlError

app = typer.Typer(
    name="verl",
    help="Reinforcement learning for large language models after pre-training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Measure speed and memory with synthetic work.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Model = Annotated[str, typer.Option("--model", help="Hugging Face folder or hub name.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Tokens sampled at most.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
NumSamples = Annotated[int, typer.Option("--num-samples", help="Responses to each prompt.")]
Seed = Annotated[int, typer.Option("--seed", help="Every draw follows from it.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
PromptKey = Annotated[str, typer.Option("--prompt-key", help="Column that holds the prompt.")]


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="YAML file, or the name of a built-in recipe such as quickstart.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value …, over the file.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config, data and reward, print the plan, train nothing.")
    ] = False,
) -> None:
    """Train with the algorithm that the config names."""
    from verl.config import load_config
    from verl.trainer.launch import plan, train_run
    from verl.trainer.placement import is_other_rank, serve_rank_0

    if dry_run and is_other_rank():
        return
    serve_rank_0()
    run = load_config(config, overrides or [])
    if dry_run:
        typer.echo(plan(run))
        return
    raise typer.Exit(train_run(run))


@app.command()
def generate(
    model: Model,
    prompts: Annotated[Path, typer.Option("--prompts", help="jsonl file, one prompt a row.")],
    out: Annotated[Path, typer.Option("--out", help="jsonl file to write.")],
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 1.0,
    num_samples: NumSamples = 1,
    seed: Seed = 0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="1 keeps all tokens.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="0 keeps all tokens.")] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="String that ends a response; may be repeated.")
    ] = None,
    prompt_key: PromptKey = "prompt",
    device: Device = "auto",
) -> None:
    """Sample responses to a file of prompts."""
    from verl.rollout.base import SamplingParams
    from verl.trainer.inference import generate_file, load_sampler
    from verl.trainer.options import GENERATE, keys_as_options
    from verl.trainer.output import prepare_output

    with keys_as_options(GENERATE):
        prepare_output(out, prompts)
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop=tuple(stop or ()),
        )
        sampler = load_sampler(model, device=device, seed=seed)
        rows = generate_file(sampler, prompts, out, sampling, num_samples=num_samples, seed=seed, prompt_key=prompt_key)
        typer.echo(f"{rows} responses written to {out}")


@app.command(name="eval")
def evaluate(
    model: Model,
    data: Annotated[str, typer.Option("--data", help="Data set: file, folder, hub name or gym:task.")],
    reward: Annotated[str, typer.Option("--reward", help="Reward by name, or file.py:function.")],
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    num_samples: NumSamples = 1,
    seed: Seed = 0,
    prompt_key: PromptKey = "prompt",
    ground_truth_key: Annotated[
        str, typer.Option("--ground-truth-key", help="Column that holds the answer; null: none does.")
    ] = "ground_truth",
    prompt_template: Annotated[str, typer.Option("--prompt-template", help="Text around {prompt}.")] = "{prompt}",
    max_rows: Annotated[int | None, typer.Option("--max-rows", help="Rows to use; default all.")] = None,
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", help="System message before each prompt.")
    ] = None,
    passing: Annotated[float, typer.Option("--passing", help="Least score that counts as solved.")] = 1.0,
    out: Annotated[Path | None, typer.Option("--out", help="jsonl file for the scored responses.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
    device: Device = "auto",
) -> None:
    """Accuracy and pass@k of a model on a data set."""
    from verl.rewards.config import RewardConfig
    from verl.rollout.base import SamplingParams
    from verl.trainer.inference import data_config, evaluate_model, load_sampler, summary_lines
    from verl.trainer.inputs import reward_keys
    from verl.trainer.options import EVAL, keys_as_options
    from verl.trainer.output import json_lines, prepare_output, write_output

    with keys_as_options(EVAL):
        scorer = RewardConfig.parse(reward_keys(reward), "reward")
        if out is not None:
            prepare_output(out, data)
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
        sampler = load_sampler(model, device=device, seed=seed)
        keys = {"max_train_rows": max_rows, "system_prompt": system_prompt, "prompt_template": prompt_template}
        truth_key = None if ground_truth_key == "null" else ground_truth_key
        source = data_config(sampler, data, sampling, prompt_key, truth_key, **keys)
        found = evaluate_model(sampler, source, scorer, sampling, num_samples=num_samples, seed=seed, passing=passing)
        typer.echo(json.dumps(found.metrics) if as_json else "\n".join(summary_lines(found)))
        if out is not None:
            write_output(out, "".join(json_lines(found.rows)))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Run directory, checkpoint folder or model folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; default as saved.")
    ] = None,
) -> None:
    """Write a folder that plain transformers loads."""
    from verl.trainer.export import export_checkpoint

    typer.echo(f"exported to {export_checkpoint(checkpoint, target, dtype)}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directory; several are compared.")],
    png: Annotated[
        Path | None,
        typer.Option("--png", help="File for the picture of the curves; default: in the folder of a single run."),
    ] = None,
) -> None:
    """Summary of a run: rewards, speed, the reward curve, three samples; of several runs a table."""
    from verl.trainer.launch import report as write_report

    write_report(runs, png)


@bench_app.command(name="step")
def bench_step(
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value …, over the bench's defaults.")] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps measured, after one that isn't.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A synthetic GRPO step on random weights: tokens/s, MFU, seconds by phase, peak memory."""
    from verl.bench.step import measure_step, step_lines

    found = measure_step(overrides or [], steps)
    typer.echo(json.dumps(found) if as_json else "\n".join(step_lines(found)))


@bench_app.command(name="rollout")
def bench_rollout(
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value …, over the bench's defaults.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", help="fixed, spread, group, update or sleep; may be repeated. Default: all."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Warm calls measured, after a first one.")] = 3,
    beside: Annotated[
        str | None, typer.Option("--beside", help="generate: transformers' own, on the same weights and work.")
    ] = None,
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Compare log-probs with those of the training forward pass.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The rollout engine on random weights and prompts: tokens/s, seconds by phase, memory, new weights, sleep."""
    from verl.bench.rollout import measure_rollout
    from verl.bench.setting import figure_lines

    found = measure_rollout(
        overrides or [], workloads=workload or [], repeats=repeats, beside=beside, log_probs=log_probs
    )
    typer.echo(json.dumps(found) if as_json else "\n".join(figure_lines(found)))


@bench_app.command(name="controller")
def bench_controller(
    executor: Annotated[str, typer.Option("--executor", help="processes or ray.")] = "processes",
    calls: Annotated[int, typer.Option("--calls", help="Calls measured, after a first one.")] = 20,
    max_ranks: Annotated[int, typer.Option("--max-ranks", help="Workers of the widest call, up to 64.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a call to workers costs the program, against payload (1 KB to 64 MB) and number of workers."""
    from verl.bench.controller import controller_lines, measure_controller

    found = measure_controller(executor, num_calls=calls, max_ranks=max_ranks)
    typer.echo(json.dumps(found) if as_json else "\n".join(controller_lines(found)))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Reinforcement learning for large language models after pre-training."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def set_up_logging() -> None:
    """Lines of this library, and warnings of others, on standard error; each once."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("verl").setLevel(logging.INFO)
    logging.getLogger("huggingface_hub").propagate = False  # it prints its lines itself
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # a warning that concerns no user of ours


def main() -> None:
    """Entry of the ``verl`` command: a known error is one message and exit code 1, not a traceback."""
    exit_without_collecting()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character gets a question mark
    set_up_logging()
    try:
        app()
    except VerlError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)
