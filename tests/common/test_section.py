import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from pydantic import AliasChoices, Field, ValidationError, create_model, field_validator

from verl.common.errors import ConfigError
from verl.common.section import Section, key_paths


def read(annotation: Any, value: Any) -> Any:
    """What a section makes of ``value`` for a field of that type; an error is its text."""
    section = create_model("OneKey", __base__=Section, key=(annotation, ...))
    try:
        return section.parse({"key": value}).key  # type: ignore[attr-defined]
    except ConfigError as error:
        return str(error)


Positive = Annotated[int, Field(gt=0)]
Alias = Annotated[Optional[float], "learning rate"]  # noqa: UP045  # the old spelling must work too


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (float, "1e-6", 1e-6),
        (float, "5e-5", 5e-5),
        (float, "08", 8.0),
        (float, 3, 3.0),
        (float | None, "1e-6", 1e-6),
        (Alias, "1e-6", 1e-6),
        (float | None, None, None),
        (float | None, "null", None),
        (float | None, "~", None),
        (int, "1e6", 1_000_000),
        (int, 1e6, 1_000_000),
        (int, "08", 8),
        (int, "-3", -3),
        (int, "12345678901234567890", 12345678901234567890),
        (Positive, "1e3", 1000),
        (int | None, "1e6", 1_000_000),
        (Union[int, None], "08", 8),  # noqa: UP007
        (int | str, 5, 5),
        (int | str, "5", 5),
        (int | str, "auto", "auto"),
        (float | str, "1e-6", 1e-6),
        (int | Literal["auto"], "1e3", 1000),
        (int | Literal["auto"], "auto", "auto"),
        (bool, "on", True),
        (bool, "off", False),
        (bool, True, True),
        (bool | int, True, True),
        (bool | int, 3, 3),
        (str, "1e-6", "1e-6"),
        (str, "on", "on"),
        (str, 2024, "2024"),
        (str | None, "null", "null"),
        (Path, 2024, Path("2024")),
        (list[float], ["1e-6", 1, "08"], [1e-6, 1.0, 8.0]),
        (list[int] | None, ["1e3"], [1000]),
        (tuple[float, int], ["1e-6", "1e3"], (1e-6, 1000)),
        (tuple[float, ...], ["1e-6", 2], (1e-6, 2.0)),
        (list[list[int]], [["1e3"], []], [[1000], []]),
        (set[int], ["1e3", 1000.0], {1000}),
        (float | list[float], "1e-6", 1e-6),
        (float | list[float], ["1e-6"], [1e-6]),
        (dict[str, float], {"a": "1e-6", 1: 2}, {"a": 1e-6, "1": 2.0}),
        (dict[str, int | None], {"a": "1e3", "b": "null"}, {"a": 1000, "b": None}),
        (dict[str, list[float]], {"a": ["1e-6"]}, {"a": [1e-6]}),
        (dict[str, Any], {"a": True, "b": "1e3"}, {"a": True, "b": "1e3"}),
        (Literal["off", "auto"], False, "off"),
        (Literal["on", "auto"], True, "on"),
        (Literal[1, 2], "2", 2),
        (Literal["1", "2"], 2, "2"),
        (Literal[True, "auto"], True, True),
    ],
    ids=str,
)
def test_the_declared_type_decides(annotation: Any, value: Any, expected: Any) -> None:
    got = read(annotation, value)
    assert got == expected and type(got) is type(expected)
    if isinstance(got, list | tuple):
        assert [type(item) for item in got] == [type(item) for item in expected]


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (float, True),
        (float, "on"),
        (float, "abc"),
        (float, "nan"),
        (float, "inf"),
        (float, float("inf")),
        (int, False),
        (int, 1.5),
        (int, "1.5"),
        (int, "1e-6"),
        (int, "null"),
        (int, None),
        (Positive, "0"),
        (Positive, True),
        (float | None, True),
        (Alias, False),
        (int | str, True),
        (int | str, 1.5),
        (float | list[float], True),
        (float | list[float], [True]),
        (list[float], [0.5, True]),
        (list[float], "0.5"),
        (tuple[float, float], [0.9, True]),
        (tuple[int, ...], [True]),
        (set[int], [True]),
        (list[list[int]], [[1], [True]]),
        (dict[str, float], {"a": True}),
        (dict[str, float | None], {"a": False}),
        (dict[str, list[int]], {"a": [True]}),
        (list[dict[str, int]], [{"a": True}]),
        (str, True),
        (str, 1.10),
        (str | None, False),
        (str, datetime.date(2024, 1, 1)),
        (Path, True),
        (list[str], ["a", True]),
        (bool, 2),
        (bool, "maybe"),
        (Literal["auto"], True),
        (Literal["on", "yes"], True),
        (Literal[1, 2], True),
    ],
    ids=str,
)
def test_what_the_declared_type_refuses(annotation: Any, value: Any) -> None:
    text = read(annotation, value)
    assert isinstance(text, str) and "key" in text.split(":")[0], text


def test_message_names_key_value_and_way_out() -> None:
    assert read(float, "abc") == ("key: Input should be a valid number, unable to parse string as a number, got 'abc'")
    assert read(float, True) == (
        "key: takes a number, but got the boolean True (YAML reads on, off, yes and no as booleans: quote text)"
    )
    assert read(str, 1.5) == "key: takes text, but got the float 1.5: put it in quotes"
    assert read(str, {"Q": 1}) == (
        "key: takes text, but got {'Q': 1} (YAML reads text with a colon as keys: put it in quotes)"
    )


class Named(Section):
    """A key whose own check says what it was given."""

    key: str = "a"
    """A word."""
    share: float = 1.0
    """A number."""

    @field_validator("key")
    @classmethod
    def _known(cls, value: str) -> str:
        raise ValueError(f"unknown word {value!r}")

    @field_validator("share")
    @classmethod
    def _positive(cls, value: float) -> float:
        if value > 0:
            return value
        raise ValueError(f"must be > 0, got {value}")


def test_what_was_given_is_said_once() -> None:
    with pytest.raises(ConfigError) as error:
        Named.parse({"key": "b", "share": "0"})
    assert str(error.value) == "key: unknown word 'b'\nshare: must be > 0, got 0.0"


class Color(Enum):
    RED = "red"


class Optim(Section):
    learning_rate: float = 1e-6
    """Peak rate."""
    steps: int = 0
    color: Color = Color.RED


class Role(Section):
    optim: Optim = Optim()
    second: Optim | None = None
    more: dict[str, Optim] = {}
    model_part: str = Field("x", validation_alias="model_config_like")
    either: int = Field(1, validation_alias=AliasChoices("either", "or"))


class Run(Section):
    actor: Role = Role()
    seed: int = 0


def problem(values: dict[str, Any], where: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        Run.parse(values, where)
    return str(caught.value)


def test_parse_reads_nested_sections() -> None:
    run = Run.parse({"actor": {"optim": {"learning_rate": "1e-5", "color": "red"}, "or": "2"}, "seed": "1e3"})
    assert (run.actor.optim.learning_rate, run.actor.optim.color, run.actor.either, run.seed) == (
        1e-5,
        Color.RED,
        2,
        1000,
    )
    assert run.is_set("seed") and run.actor.is_set("optim") and not run.actor.is_set("second")
    assert Run.parse({"actor": Role(optim=Optim(steps=3))}).actor.optim.steps == 3


def test_unknown_keys_name_section_and_nearest() -> None:
    text = problem({"actor": {"optim": {"leraning_rate": 1e-5}}})
    assert text == (
        "actor.optim: unknown key 'leraning_rate'; did you mean 'learning_rate'? "
        "Optim takes: color, learning_rate, steps"
    )
    assert "trainer.actor.optim: " in problem({"actor": {"optim": {"x": 1}}}, where="trainer")
    for where in ({"second": {"stepz": 1}}, {"more": {"a": {"stepz": 1}}}):
        assert "did you mean 'steps'" in problem({"actor": where})
    with pytest.raises(ValidationError, match=r"unknown key 'stepz'; did you mean 'steps'"):
        Optim(stepz=1)  # type: ignore[call-arg]


def test_right_key_in_the_wrong_section_says_where_it_belongs() -> None:
    assert "'learning_rate' is known as actor.optim.learning_rate" in problem({"learning_rate": 1})
    assert "'seed' is known as seed" in problem({"actor": {"seed": 1}})


def test_every_wrong_key_is_reported_at_once() -> None:
    text = problem({"seed": True, "actor": {"optim": {"learning_rate": "abc", "steps": "on"}, "model_part": 1}})
    assert [line.split(":")[0] for line in text.splitlines()] == ["actor", "seed"]
    text = problem({"seed": True, "actor": {"optim": {"learning_rate": "abc", "steps": "on"}}})
    assert [line.split(":")[0] for line in text.splitlines()] == [
        "actor.optim.learning_rate",
        "actor.optim.steps",
        "seed",
    ]


def test_aliases_are_the_only_spelling() -> None:
    assert Role.parse({"model_config_like": "y"}).model_part == "y"
    assert "unknown key 'model_part'" in problem({"actor": {"model_part": "y"}})


def test_key_paths() -> None:
    assert list(key_paths(Run)) == [
        "actor",
        *(f"actor.{s}{k}" for s in ("optim", "second", "more") for k in ("", ".learning_rate", ".steps", ".color")),
        "actor.model_config_like",
        "actor.either",
        "seed",
    ]


def test_sections_are_frozen_documented_and_have_checked_defaults() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Optim().steps = 3  # type: ignore[misc]
    assert Optim.model_fields["learning_rate"].description == "Peak rate."

    class Wrong(Section):
        rate: float = True

    with pytest.raises(ValidationError, match="got the boolean True"):
        Wrong()
