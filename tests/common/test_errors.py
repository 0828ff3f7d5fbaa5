import re

import pytest

from verl.common import errors


def test_every_error_is_in_the_drawn_tree_and_catchable_as_one() -> None:
    drawn = set(re.findall(r"^ +(\w+)(?: \(\w+\))?  +|^ +(\w+) \(\w+\)", errors.__doc__ or "", re.MULTILINE))
    named = {name for pair in drawn for name in pair if name} | {"VerlError"}
    kinds = {k for k, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.VerlError)}
    assert kinds == named


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.UnknownName, ValueError),
        (errors.DataError, ValueError),
        (errors.ShapeError, ValueError),
        (errors.MissingField, KeyError),
        (errors.LayoutError, ValueError),
        (errors.MissingExtra, ImportError),
        (errors.UnsupportedModel, ValueError),
    ],
)
def test_builtin_kinds(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin) and issubclass(kind, errors.VerlError)


def test_messages() -> None:
    assert str(errors.MissingField("column 'x' isn't there")) == "column 'x' isn't there"
    assert str(errors.MissingField()) == ""
    assert str(errors.MissingExtra("wandb", "track", "tracker.wandb")) == (
        "tracker.wandb needs the package 'wandb': pip install 'verl[track]'"
    )
    error = errors.WorkerError("actor", 3, "boom")
    assert (error.role, error.rank, str(error)) == ("actor", 3, "actor worker, rank 3: boom")


def test_did_you_mean() -> None:
    assert errors.did_you_mean("leraning_rate", ["lr", "learning_rate"]) == "; did you mean 'learning_rate'?"
    assert errors.did_you_mean("xyz", ["lr", "learning_rate"]) == "" == errors.did_you_mean("x", [])
