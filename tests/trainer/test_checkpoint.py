import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.common import files
from verl.common.errors import CheckpointError, ConfigError
from verl.trainer.checkpoint import ABSENT, CheckpointStore, changed_keys, open_checkpoint


def writes(text: str):
    def write(folder: Path) -> None:
        (folder / "data").write_text(text)
        (folder / ".hidden").write_text("dot " + text)

    return write


def save(store: CheckpointStore, step: int, text: str = "x") -> Path:
    parts = {"actor/model": writes(f"model {step} {text}"), "actor/optimizer": writes(f"optimizer {step} {text}")}
    return store.save(step, parts, {"position": step * 2, "best": None})


def steps(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if path.name not in (".lock", "latest"))


def test_save_and_read_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    folder = save(store, 4)
    assert folder == tmp_path / "checkpoints" / "step_000004"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000004\n"
    found = store.latest()
    assert found is not None and (found.path, found.step) == (folder, 4)
    assert found.state == {"position": 8, "best": None}
    assert set(found.versions) == {"verl", "torch", "transformers"}
    assert (found.part("actor/model") / "data").read_text() == "model 4 x"
    assert found.parts == ["actor/model", "actor/optimizer"]
    with pytest.raises(CheckpointError, match=r"no part 'critic/model'.*actor/model, actor/optimizer"):
        found.part("critic/model")


def test_state_that_json_would_change_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for state, where in [({"a": {1: 2}}, "state.a has the key 1"), ({"a": [0, {2}]}, r"state.a\[1\] is a set")]:
        with pytest.raises(CheckpointError, match=where):
            store.save(1, {}, state)
    store.save(1, {}, {"nan": math.nan, "big": 2**70, "text": "é", "list": [1, None, True]})
    found = store.latest()
    assert found is not None and math.isnan(found.state["nan"])
    assert {k: v for k, v in found.state.items() if k != "nan"} == {
        "big": 2**70,
        "text": "é",
        "list": [1, None, True],
    }


def truncate_model(folder: Path) -> str:
    (folder / "actor/model/data").write_text("mod")
    return "actor/model/data has 3 bytes"


def drop_optimizer(folder: Path) -> str:
    (folder / "actor/optimizer/data").unlink()
    return "actor/optimizer/data is missing"


def drop_hidden_file(folder: Path) -> str:
    (folder / "actor/optimizer/.hidden").unlink()
    return "actor/optimizer/.hidden is missing"


def flip_a_byte(folder: Path) -> str:
    path = folder / "actor/model/data"
    path.write_bytes(b"M" + path.read_bytes()[1:])
    return "content of actor/model/data has changed"


def drop_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json is missing"


def cut_manifest(folder: Path) -> str:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])
    return "manifest.json is missing or unreadable"


def empty_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"files": {}}')
    return "it lists no file"


def odd_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"files": [1]}')
    return "manifest.json is missing or unreadable"


def binary_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00")
    return "manifest.json is missing or unreadable"


def drop_state(folder: Path) -> str:
    (folder / "state.json").unlink()
    return "state.json is missing"


def empty_folder(folder: Path) -> str:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return "manifest.json is missing"


DAMAGES = [truncate_model, drop_optimizer, drop_hidden_file, flip_a_byte, drop_manifest, cut_manifest, empty_manifest]
DAMAGES += [odd_manifest, binary_manifest, drop_state, empty_folder]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_newest_is_skipped_with_a_warning(tmp_path: Path, damage, caplog) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)
    reason = damage(save(store, 4))
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None and found.step == 2 and found.state["position"] == 4
    assert (found.part("actor/model") / "data").read_text() == "model 2 x"
    assert "step_000004" in caplog.text and reason in caplog.text and "step_000002" not in caplog.text
    with pytest.raises(CheckpointError, match=r"step_000004 is no complete checkpoint"):
        open_checkpoint(tmp_path / "checkpoints/step_000004")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_all_damaged_is_an_error_and_every_one_named(tmp_path: Path, damage, caplog) -> None:
    store = CheckpointStore(tmp_path)
    reason = [damage(save(store, step)) for step in (2, 4)][1]
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* is whole: .*step_000004 is") as caught:
        store.latest()
    assert reason in str(caught.value)
    assert "step_000002" in caplog.text and "step_000004" in caplog.text


@pytest.mark.parametrize("pointer", [None, "", "step_000009\n", "../../etc", "nonsense", b"\xff\xfe"])
def test_pointer_that_helps_nobody(tmp_path: Path, pointer: str | bytes | None, caplog) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2), save(store, 4)
    path = store.folder / "latest"
    path.unlink()
    if pointer is not None:
        path.write_bytes(pointer if isinstance(pointer, bytes) else pointer.encode())
    found = store.latest()
    assert found is not None and found.step == 4
    assert ("isn't there" in caplog.text) == (pointer == "step_000009\n")


def test_going_back_to_an_earlier_step_leaves_the_given_up_ones_behind(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 2), save(store, 8, "given up")
    save(store, 4, "new")
    found = store.latest()
    assert found is not None and found.step == 4
    assert steps(store) == ["step_000002", "step_000004"]
    truncate_model(found.path)
    fallback = store.latest()
    assert fallback is not None and fallback.step == 2


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 4, "first"), save(store, 4, "second")
    found = store.latest()
    assert found is not None and (found.part("actor/model") / "data").read_text() == "model 4 second"
    assert steps(store) == ["step_000004"]
    truncate_model(found.path)
    save(store, 4, "third")
    assert store.latest() is not None


def test_killed_between_the_two_renames_of_a_replacement(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    folder = save(store, 4, "old")
    folder.rename(files.displaced_name(folder))
    found = store.latest()
    assert found is not None and found.step == 4 and (found.part("actor/model") / "data").read_text() == "model 4 old"
    save(store, 4, "new")
    found = store.latest()
    assert found is not None and found.path == folder and steps(store) == ["step_000004"]


def test_failed_replacement_leaves_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 4, "old")
    with pytest.raises(ZeroDivisionError):
        store.save(4, {"actor/model": lambda folder: 1 // 0}, {})
    found = store.latest()
    assert found is not None and (found.part("actor/model") / "data").read_text() == "model 4 old"
    assert steps(store) == ["step_000004"]


def test_pruning_keeps_complete_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (2, 4, 6):
        save(store, step)
    assert steps(store) == ["step_000004", "step_000006"]
    truncate_model(tmp_path / "checkpoints/step_000006")
    save(store, 8)
    assert steps(store) == ["step_000004", "step_000008"], "a damaged one doesn't count as kept"
    save(CheckpointStore(tmp_path, keep=None), 10)
    assert steps(store) == ["step_000004", "step_000008", "step_000010"]
    save(CheckpointStore(tmp_path, keep=1), 12)
    assert steps(store) == ["step_000012"]
    with pytest.raises(ConfigError, match=r"trainer.keep_checkpoints must be >= 1.*got 0"):
        CheckpointStore(tmp_path, keep=0)


def test_leftovers_of_the_dead_go_and_other_files_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 2)
    dead = store.folder / ".step_000004.999999.tmp"
    (dead / "actor").mkdir(parents=True)
    (store.folder / ".latest.999999.tmp").write_text("step")
    (store.folder / "notes.tmp").write_text("mine")
    assert store.latest() is not None and dead.exists(), "reading removes nothing"
    save(store, 4)
    assert steps(store) == ["notes.tmp", "step_000004"]


def test_part_without_files_is_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=r"'actor/model'.*wrote no file.*trainer.output_dir"):
        store.save(1, {"actor/model": lambda folder: None}, {})
    assert steps(store) == [] and store.latest() is None


def raises(error: BaseException):
    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    return write


FULL = [
    OSError(28, "No space left on device"),
    OSError(122, "Disk quota exceeded"),
    RuntimeError("I/O error: No space left on device (os error 28)"),
    RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
]


@pytest.mark.parametrize("error", FULL, ids=str)
def test_full_disk_names_what_to_change_and_harms_nothing(tmp_path: Path, error: Exception) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 2)
    size = files.manifest_bytes(tmp_path / "checkpoints/step_000002")
    with pytest.raises(CheckpointError) as caught:
        store.save(4, {"actor/model": writes("m"), "actor/optimizer": raises(error)}, {})
    text = str(caught.value)
    assert str(store.folder) in text and f"{size:,}" in text and "are free" in text
    assert "trainer.output_dir" in text and "trainer.keep_checkpoints (now 3)" in text
    assert steps(store) == ["step_000002"]
    found = store.latest()
    assert found is not None and found.step == 2


def test_other_failures_clean_up_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)
    with pytest.raises(CheckpointError, match=r"step 4 can't be written in .*Input/output error"):
        store.save(4, {"a": raises(OSError(5, "Input/output error"))}, {})
    with pytest.raises(KeyboardInterrupt):
        store.save(4, {"a": raises(KeyboardInterrupt())}, {})
    assert steps(store) == ["step_000002"]


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    called: list[Path] = []
    with pytest.raises(CheckpointError, match=r"needs at least 1,152,921,504,606,846,976 bytes"):
        store.save(1, {"a": called.append}, {}, estimated_bytes=2**60)
    assert called == [] and steps(store) == []


FILE_LIMIT = """
import resource, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from verl.common.errors import CheckpointError
from verl.trainer.checkpoint import CheckpointStore
from verl.engines.saved_optimizer import save_optimizer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = CheckpointStore(Path(sys.argv[1]))
store.save(2, {"a": lambda f: (f / "data").write_text("good")}, {})
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
zeros = {"x": torch.zeros(300_000)}
writers = {
    "python": lambda f: (f / "data").write_bytes(bytes(1_200_000)),
    "torch": lambda f: torch.save(zeros, f / "data"),
    "safetensors": lambda f: save_file(zeros, f / "data"),
    "optimizer": lambda f: save_optimizer(f, torch.optim.SGD([("x", torch.zeros(1))]), masters=zeros),
}
for name, write in writers.items():
    try:
        store.save(4, {"a": write}, {})
        print(name, "wrote it")
    except CheckpointError as error:
        print(name, "no room" in str(error), store.latest().step, sorted(p.name for p in store.folder.glob("*step*")))
"""


EXPECTED = [f"{name} True 2 ['step_000002']" for name in ("python", "torch", "safetensors", "optimizer")]


def test_real_writers_at_a_file_size_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FILE_LIMIT, str(tmp_path), "limit"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == EXPECTED, done.stderr


def test_real_writers_on_a_full_disk(tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        command = [sys.executable, "-c", FILE_LIMIT, str(tmp_path / "run"), "disk"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.splitlines() == EXPECTED, done.stderr
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


SAVER = """
import sys
from pathlib import Path
from verl.trainer.checkpoint import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep=2)
start = store.latest()
step = start.step if start else 0

def write(kind):
    def inner(folder):
        for i in range(12):
            (folder / f"{i}").write_text(f"{kind} {step} {i} " * 400)
    return inner

print("ready", flush=True)
while True:
    step += 1
    store.save(step, {"actor/model": write("model"), "actor/optimizer": write("optimizer")}, {"step": step})
    print("saved", flush=True)
"""


def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(0)
    newest, save_s = 0, 0.1
    for round_number in range(10):
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert saver.stdout is not None and saver.stdout.readline() == "ready\n"
        if round_number % 3 == 1:
            start = time.monotonic()
            assert saver.stdout.readline() == "saved\n"
            save_s = time.monotonic() - start
        time.sleep(draw.uniform(0, 2 * save_s))
        os.kill(saver.pid, signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
        found = CheckpointStore(tmp_path, keep=2).latest()
        if found is None:
            assert newest == 0, "the last good one was lost"
            continue
        assert found.step >= newest and found.state == {"step": found.step}
        for kind in ("model", "optimizer"):
            texts = [(found.part(f"actor/{kind}") / str(i)).read_text() for i in range(12)]
            assert texts == [f"{kind} {found.step} {i} " * 400 for i in range(12)]
        newest = found.step
    assert newest > 0
    store = CheckpointStore(tmp_path, keep=1)
    save(store, newest + 1)
    assert steps(store) == [f"step_{newest + 1:06d}"]


def test_two_processes_saving_into_one_run_wait_for_each_other(tmp_path: Path) -> None:
    code = SAVER.replace("while True", "for _ in range(6)")
    savers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL) for _ in "ab"]
    assert [saver.wait(60) for saver in savers] == [0, 0]
    store = CheckpointStore(tmp_path)
    assert store.latest() is not None
    assert not [name for name in steps(store) if not name.startswith("step_") or name.endswith(".old")]


def test_changed_keys() -> None:
    old = {"a": {"lr": 1e-6, "n": 1, "list": [1, 2]}, "same": {"x": float("nan")}, "flag": True, "gone": None}
    new = {"a": {"lr": 1e-5, "n": 1.0, "list": (1, 2)}, "same": {"x": float("nan")}, "flag": 1, "new": {"k": {}}}
    assert changed_keys(old, new) == {
        "a.lr": (1e-6, 1e-5),
        "flag": (True, 1),
        "gone": (None, ABSENT),
        "new.k": (ABSENT, {}),
    }
    assert changed_keys(old, old) == {} and repr(ABSENT) == "(not set)"


def test_manifest_is_readable_by_people(tmp_path: Path) -> None:
    manifest = json.loads((save(CheckpointStore(tmp_path), 1) / "manifest.json").read_text())
    assert manifest["files"]["actor/model/data"]["bytes"] == len("model 1 x")
