import functools
from pathlib import Path
from typing import Any

import pytest

from verl.common.errors import ConfigError
from verl.rewards.calling import bind, describe, find

FIELDS = {"prompt": "p", "response": "r", "ground_truth": "g", "level": 3}


def _keyword_only(*, response: str, level: int) -> tuple[str, int]:
    return response, level


def _positional_only(a: str, b: str, c: str, /) -> str:
    return a + b + c


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def __call__(self, response: str) -> int:
        self.count += 1
        return self.count


async def _later(response: str) -> str:
    return response


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda response: response, "r"),
        (lambda prompt, response, ground_truth: prompt + response + ground_truth, "prg"),
        (lambda ground_truth, response: response + ground_truth, "rg"),
        (lambda response, level: (response, level), ("r", 3)),
        (lambda response, missing=7: (response, missing), ("r", 7)),
        (lambda response, level=7: (response, level), ("r", 3)),
        (lambda **row: sorted(row), ["ground_truth", "level", "prompt", "response"]),
        (lambda response, **row: sorted(row), ["ground_truth", "level", "prompt"]),
        (lambda a, b, c: a + b + c, "prg"),
        (lambda *all: "".join(all), "prg"),
        (lambda response, *rest: (response, rest), ("r", ())),
        (_keyword_only, ("r", 3)),
        (_positional_only, "prg"),
        (functools.partial(lambda response, scale: response * scale, scale=2), "rr"),
        (_later, "r"),
    ],
)
def test_only_what_is_named_is_passed(function: Any, value: object) -> None:
    assert bind(function, {})(FIELDS) == value


def test_kwargs_win_over_the_row() -> None:
    assert bind(lambda response, level: level, {"level": 9})(FIELDS) == 9
    with pytest.raises(ConfigError, match=r"reward\.kwargs names \['lvel'\].*takes.*'level'"):
        bind(lambda response, level: level, {"lvel": 9})


@pytest.mark.parametrize(
    ("function", "needs"),
    [
        (lambda response, entry, level=1: 0, {"response", "entry"}),
        (lambda response, entry, **row: 0, {"response", "entry"}),
        (lambda response, scale: 0, {"response"}),
        (lambda a, b, c: 0, set()),
        (lambda **row: 0, set()),
        (Counter, {"response"}),
    ],
)
def test_what_a_function_needs_is_known_before_it_is_called(function: Any, needs: set[str]) -> None:
    kwargs = {"start": 1} if function is Counter else {"scale": 2} if "scale" in function.__code__.co_varnames else {}
    assert bind(function, kwargs).needs == needs


def test_a_class_that_cant_be_made_names_the_key() -> None:
    for kwargs, said in (({}, "'start'"), ({"start": 1, "zz": 2}, "'zz'")):
        with pytest.raises(ConfigError, match=rf"Counter\(.*start: int.*reward\.kwargs.*{said}"):
            bind(Counter, kwargs)


def test_a_class_is_made_once() -> None:
    call = bind(Counter, {"start": 5})
    assert [call(FIELDS), call(FIELDS)] == [6, 7]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TypeError, match=r"'answer'.*'level'"):
        bind(lambda response, answer: 0, {})(FIELDS)
    with pytest.raises(ConfigError, match="callable"):
        bind(5, {})


def test_functions_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "helper_of_reward.py").write_text("def double(x): return x + x\n")
    path = tmp_path / "mine.py"
    path.write_text("from helper_of_reward import double\ndef f(response):\n    return double(response)\n")
    source = find(f"{path}:f")
    path.write_text("broken(")
    assert source.load()("r") == "rr"  # the text was read when the run was set up


def test_wrong_places(tmp_path: Path) -> None:
    for spec in ("nonsense", "x.py", ":f", "a.b:", "a.b:c d"):
        with pytest.raises(ConfigError, match=r"file\.py:function"):
            find(spec)
    with pytest.raises(ConfigError, match="no file"):
        find(f"{tmp_path}/none.py:f")
    (tmp_path / "mine.py").write_text("def score(response): return 1\n")
    with pytest.raises(ConfigError, match=r"'scroe'.*'score'"):
        find(f"{tmp_path}/mine.py:scroe").load()


def test_describe_names_the_place() -> None:
    try:
        bind(lambda response: 1 / 0, {})(FIELDS)
    except ZeroDivisionError as error:
        assert describe(error).startswith("ZeroDivisionError: division by zero (test_calling.py:")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bad\n  second line"), "ValueError: bad second line"),
        (ValueError(), "ValueError"),
        (SystemExit(0), "SystemExit: 0"),
        (SyntaxError("no", ("f.py", 3, 1, "x y")), "SyntaxError: no (f.py, line 3)"),
        (Unspeakable(), "Unspeakable: its message can't be made"),
    ],
)
def test_describe_says_the_type_and_the_message_in_one_line(error: BaseException, said: str) -> None:
    assert describe(error) == said
