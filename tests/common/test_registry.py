import math

import pytest

from verl.common.errors import ConfigError, UnknownName
from verl.common.registry import Registry

TABLE = Registry("function", {"root": "math:sqrt", "broken": "math:nothing_of_that_name"})


def test_entries_are_loaded_when_asked_for() -> None:
    assert TABLE.load("root") is math.sqrt
    with pytest.raises(AttributeError):
        TABLE.load("broken")
    assert dict(TABLE) == {"root": "math:sqrt", "broken": "math:nothing_of_that_name"} and len(TABLE) == 2


def test_unknown_name_says_the_nearest_and_all() -> None:
    with pytest.raises(
        UnknownName, match=r"unknown function 'rot'; did you mean 'root'\? Known: broken, root"
    ) as caught:
        TABLE.load("rot")
    assert isinstance(caught.value, ConfigError)


def test_table_is_a_copy() -> None:
    entries = {"a": "math:pi"}
    table = Registry("number", entries)
    entries["b"] = "math:e"
    assert list(table) == ["a"]
