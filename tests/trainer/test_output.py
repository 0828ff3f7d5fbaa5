from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import files_of_at_most
from verl.common.errors import ConfigError
from verl.trainer.output import json_lines, prepare_output, write_output


def test_outputs_are_tried_before_any_work(tmp_path: Path) -> None:
    prepare_output(tmp_path / "a" / "b.jsonl")
    assert (tmp_path / "a").is_dir() and not (tmp_path / "a" / "b.jsonl").exists()
    with pytest.raises(ConfigError, match="is a folder"):
        prepare_output(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        prepare_output(tmp_path / "file" / "out.jsonl")
    with pytest.raises(ConfigError, match="--out '/proc/o' can't be written"):
        prepare_output(Path("/proc/o"))
    prepare_output(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


def test_the_output_is_never_the_input(tmp_path: Path) -> None:
    prompts, link = tmp_path / "p.jsonl", tmp_path / "link.jsonl"
    prompts.write_text("{}")
    link.symlink_to(prompts)
    for out, source in ((prompts, prompts), (link, prompts), (prompts, str(link))):
        with pytest.raises(ConfigError, match="is the file that the prompts come from"):
            prepare_output(out, source)
    prepare_output(prompts, "gym:chain_sum?size=5")
    prepare_output(tmp_path / "new.jsonl", prompts)
    assert prompts.read_text() == "{}"


def test_what_does_not_fit_leaves_the_older_file(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write_output(old, "as it was")
    with files_of_at_most(100):
        for path in (old, new):
            with pytest.raises(ConfigError, match=f"--out '{path}' can't be written: .*too large"):
                write_output(path, "x" * 101)
    assert old.read_text() == "as it was" and list(tmp_path.iterdir()) == [old]
    with files_of_at_most(0), pytest.raises(ConfigError, match="can't be written"):
        prepare_output(new)
    assert list(tmp_path.iterdir()) == [old]


def test_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    for name in ("null", "full"):
        (tmp_path / name).symlink_to(f"/dev/{name}")
    write_output(tmp_path / "null", "gone")
    with pytest.raises(ConfigError, match="No space left"):
        write_output(tmp_path / "full", "gone")
    assert Path("/dev/null").is_char_device() and (tmp_path / "null").is_symlink()


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("old")
    write_output(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


def test_rows_that_json_or_utf8_cant_hold_are_written_too() -> None:
    endless: list[Any] = []
    endless.append(endless)
    rows: list[dict[str, object]] = [{"text": "half \ud83d, \u00e9"}, {"text": {(0, 1): "wall"}}, {"text": endless}]
    lines = "".join(json_lines(rows)).encode().decode().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [rows[0]["text"], "{(0, 1): 'wall'}", "[[...]]"]
