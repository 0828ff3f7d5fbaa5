import os
from pathlib import Path
from threading import Thread

import psutil
import pytest

from verl.common import files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_text_replaces_and_leaves_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    files.write_text(path, "one")
    files.write_text(path, "zwei é")
    assert path.read_text(encoding="utf-8") == "zwei é" and names(path.parent) == ["file.txt"]
    with pytest.raises(TypeError):
        files.write_json(path, {"x": object()})
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "zwei é" and names(path.parent) == ["file.txt"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_folder_have_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with files.folder_written_aside(tmp_path / "a") as aside:
            (aside / "deep").mkdir()
            for name in ("x", "deep/y"):
                (aside / name).touch(mode=0o600)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "a").rglob("*") if path.is_file()} == {oct(mode)}


def test_folder_is_whole_or_absent(tmp_path: Path) -> None:
    with files.folder_written_aside(tmp_path / "a") as aside:
        (aside / "x").write_text("1")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a/x").read_text() == "1"
    with pytest.raises(ZeroDivisionError), files.folder_written_aside(tmp_path / "b") as aside:
        (aside / "x").write_text(str(1 // 0))
    with pytest.raises(OSError), files.folder_written_aside(tmp_path / "a") as aside:
        (aside / "x").write_text("2")
    assert (tmp_path / "a/x").read_text() == "1" and names(tmp_path) == ["a"]


def test_folder_replaced(tmp_path: Path) -> None:
    for text in ("1", "2"):
        with files.folder_written_aside(tmp_path / "a", replace=True) as aside:
            (aside / "x").write_text(text)
        assert (tmp_path / "a/x").read_text() == text and names(tmp_path) == ["a"]
    with pytest.raises(ZeroDivisionError), files.folder_written_aside(tmp_path / "a", replace=True):
        _ = 1 // 0
    assert (tmp_path / "a/x").read_text() == "2" and names(tmp_path) == ["a"]


def test_failed_last_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_text("old")
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(source).name.endswith(".tmp"):
            raise OSError("can't")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="can't"), files.folder_written_aside(tmp_path / "a", replace=True):
        pass
    assert (tmp_path / "a/x").read_text() == "old" and names(tmp_path) == ["a"]


def test_leftovers_are_told_from_other_files(tmp_path: Path) -> None:
    for name in (".a.12.tmp", ".b.tmp", "c.12.tmp", ".hidden"):
        (tmp_path / name).write_text("")
    (tmp_path / ".folder.7.tmp").mkdir()
    (tmp_path / ".folder.7.tmp/x").write_text("")
    assert files.remove_leftovers(tmp_path) == [".a.12.tmp", ".folder.7.tmp"]
    assert names(tmp_path) == [".b.tmp", ".hidden", "c.12.tmp"]
    files.remove_folder(tmp_path / "nowhere")


def test_manifest(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "small").write_text("12")
    (tmp_path / "deep/.large").write_text("12345")
    assert files.write_manifest(tmp_path) == 7 == files.manifest_bytes(tmp_path)
    assert files.verify_manifest(tmp_path) is None
    (tmp_path / "extra").write_text("not listed")
    assert files.verify_manifest(tmp_path) is None
    (tmp_path / "deep/.large").write_text("54321")
    assert files.verify_manifest(tmp_path) == "the content of deep/.large has changed"
    assert files.verify_manifest(tmp_path, hash_limit_bytes=None) == "the content of deep/.large has changed"
    assert files.verify_manifest(tmp_path, hash_limit_bytes=6) is None, "2 bytes are within the budget, 2 + 5 aren't"
    (tmp_path / "deep/.large").write_text("1234")
    assert files.verify_manifest(tmp_path, hash_limit_bytes=0) == "deep/.large has 4 bytes, not 5"
    assert files.manifest_bytes(tmp_path / "deep") == 0


def test_content_hash(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert files.content_hash(tmp_path / "x") == "cf4ab791c62b8d2b2109c90275287816"  # b2sum -l 128


def test_free_bytes_of_a_folder_to_be(tmp_path: Path) -> None:
    free = files.free_bytes(tmp_path / "not/there/yet")
    assert 0 < free < 2**60
    assert free == pytest.approx(psutil.disk_usage(str(tmp_path)).free, rel=0.05) and not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(28, "x"), True),
        (OSError(27, "x"), True),
        (OSError(122, "x"), True),
        (OSError(13, "Permission denied"), False),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("os error 281"), False),
        (ValueError("shape"), False),
    ],
)
def test_out_of_space(error: Exception, is_full: bool) -> None:
    assert files.is_out_of_space(error) is is_full
    try:
        raise KeyError("wrapped") from error
    except KeyError as wrapped:
        assert files.is_out_of_space(wrapped) is is_full


def test_lock_excludes_threads(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with files.locked(tmp_path) as is_held:
                assert is_held
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
