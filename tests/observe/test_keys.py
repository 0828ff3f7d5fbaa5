from __future__ import annotations

from pathlib import Path

from verl.observe import keys


def test_every_key_is_defined_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = [value for name, value in vars(keys).items() if name.isupper() and isinstance(value, str)]
    names += keys.CURVES
    assert len(names) == 10 and all(f"`{name}" in page for name in names)
