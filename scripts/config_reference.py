"""Writes ``docs/config.md`` from the declared sections; with ``--check``, only says whether the page is up to date.

In come the pydantic sections of every kind of run and of every algorithm and rollout engine; out goes one table a
section, with type, default and the docstring of each key. Knows nothing of what a key does.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from verl.algorithms import ALGORITHMS
from verl.algorithms.clipped_policy import RatioPolicyConfig
from verl.common.registry import Registry
from verl.rollout import ROLLOUT_ENGINES
from verl.trainer.base_sections import Run
from verl.trainer.families import RUNS
from verl.trainer.sections import OnPolicyRun

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
VARIANTS: dict[str, Registry] = {"algorithm": ALGORITHMS, "rollout": ROLLOUT_ENGINES}
"""Sections whose keys depend on their ``name``."""
KINDS: dict[str, type[Run]] = {family: RUNS.load(family) for family in RUNS}
"""Every kind of run by its family, the on-policy one first."""

_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", Any: "anything"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_HEAD = """# Configuration

Every key of a run: {count} in all. This page is generated from the code (`make docs`); `make check` fails when it is
out of date.

A run is a YAML file with the sections below, or the same names passed to its trainer. `algorithm.name` decides the kind
of run ({kinds}); a section or key that only some kinds have says which. Words of the form
`key.path=value` on the command line win over the file. A key that isn't on this page is an error that names the nearest
one that is; so are a wrong type, a key given twice, and sizes that can't be together. A key that is right but has no
effect beside the others is named in a warning. All of this happens before a model is loaded, and `verl train <config>
--dry-run` prints the effective config without training. The effective config is saved as `<run>/config.yaml`, which is
itself a config.

Types are those of the declaration, not of YAML: `1e-6` is a number, and `on` isn't one. `null` means none.
`${{here:}}` in a file is the folder of that file.
"""


@dataclass(frozen=True)
class Key:
    """One row: ``name`` is dotted, below its section."""

    name: str
    kind: str
    default: str
    meaning: str


def keys_of(section: type[BaseModel], prefix: str = "") -> list[Key]:
    """The keys of ``section`` and, dotted, of the sections in it."""
    found: list[Key] = []
    for name, field in section.model_fields.items():
        spelling = prefix + (field.validation_alias if isinstance(field.validation_alias, str) else name)
        inner = _inner_section(field.annotation)
        if inner is not None:
            found += _with_defaults(keys_of(inner, spelling + "."), field, spelling)
        else:
            meaning = " ".join((field.description or "").split())
            found.append(Key(spelling, _kind(field), _default(field), meaning))
    return found


def variant_keys(section: str) -> tuple[list[Key], dict[str, list[Key]]]:
    """Keys that variants of ``section`` share, and each variant's own: what others lack or default otherwise.

    Of algorithms those share that have a ratio of policies; the others have keys of their own only.
    """
    tables = {name: keys_of(VARIANTS[section].load(name).Config) for name in VARIANTS[section]}
    base = _inner_section(OnPolicyRun.model_fields[section].annotation)
    assert base is not None
    sharing = [tables[name] for name in sharing_variants(section)]
    common = [key for key in sharing[0] if all(key in keys for keys in sharing)]
    shared = common if len(tables) > 1 else [key for key in common if key in keys_of(base)]
    shared = [key for key in shared if key.name != "name"]
    return shared, {n: [k for k in keys if k not in shared and k.name != "name"] for n, keys in tables.items()}


def sharing_variants(section: str) -> list[str]:
    """The variants of ``section`` that have its shared keys."""
    names = list(VARIANTS[section])
    if section != "algorithm":
        return names
    return [name for name in names if issubclass(VARIANTS[section].load(name).Config, RatioPolicyConfig)]


def sections() -> dict[str, dict[str, FieldInfo]]:
    """Every section -> the kinds of run that have it, and how."""
    names = dict.fromkeys(name for kind in KINDS.values() for name in kind.model_fields)
    return {
        name: {family: kind.model_fields[name] for family, kind in KINDS.items() if name in kind.model_fields}
        for name in names
    }


def kind_keys(section: str) -> list[tuple[list[str], list[Key]]]:
    """Keys of ``section`` by the kinds of run that have them alike: those of most kinds first."""
    kinds: dict[Key, list[str]] = {}
    for family, field in sections()[section].items():
        inner = _inner_section(field.annotation)
        assert inner is not None
        for key in keys_of(inner):
            kinds.setdefault(key, []).append(family)
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key, families in kinds.items():
        groups.setdefault(tuple(families), []).append(key)
    return [(list(families), keys) for families, keys in sorted(groups.items(), key=lambda group: -len(group[0]))]


def all_keys() -> list[str]:
    """Every dotted key that a user may type, each once, whichever variants and kinds of run know it."""
    found: list[str] = []
    for section in sections():
        if section in VARIANTS:
            shared, own = variant_keys(section)
            names = ["name", *(key.name for key in shared), *(key.name for keys in own.values() for key in keys)]
        else:
            names = [key.name for _, keys in kind_keys(section) for key in keys]
        found += [f"{section}.{name}" for name in names]
    return list(dict.fromkeys(found))


def page() -> str:
    """The whole page as Markdown."""
    kinds = ", ".join(f"`{family}`" for family in KINDS)
    parts = [_HEAD.format(count=len(all_keys()), kinds=kinds)]
    for section, fields in sections().items():
        only = "" if len(fields) == len(KINDS) else f" {_of_kinds(list(fields))}"
        parts.append(f"## {section}\n\n{_sentence(next(iter(fields.values())))}{only}\n")
        if section in VARIANTS:
            parts += _variant_parts(section)
            continue
        for families, keys in kind_keys(section):
            if len(families) < len(fields):
                parts.append(f"{_of_kinds(families)}\n")
            parts.append(_table(section, keys))
    return "\n".join(parts)


def main(words: list[str]) -> int:
    """Write the page, or compare it. Returns the exit code."""
    text = page()
    if words == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write("docs/config.md is out of date: run `make docs`\n")
        return 1
    if words:
        sys.stderr.write(f"unknown words {words}: give nothing, or --check\n")
        return 2
    PAGE.write_text(text, encoding="utf-8")
    return 0


def _variant_parts(section: str) -> Iterator[str]:
    shared, own = variant_keys(section)
    names = " or ".join(f"`{name}`" for name in own)
    base = _inner_section(OnPolicyRun.model_fields[section].annotation)
    assert base is not None
    default = _default(base.model_fields["name"])
    row = Key("name", names, default, "Which one. Its keys are those below and its own.")
    yield _table(section, [row])
    having = sharing_variants(section)
    if shared:
        yield f"Shared by {', '.join(f'`{name}`' for name in having)}:\n" if len(having) > 1 else ""
        yield _table(section, shared)
    for name, keys in own.items():
        yield f"### {section}.name: {name}\n"
        yield _table(section, keys) if keys else "No keys of its own.\n"


def _of_kinds(families: list[str]) -> str:
    return f"Of {', '.join(f'`{family}`' for family in families)} runs:"


def _table(section: str, keys: list[Key]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        cells = [f"`{section}.{key.name}`", key.kind, key.default, key.meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("``", "`") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _sentence(field: FieldInfo) -> str:
    inner = _inner_section(field.annotation)
    lines = (field.description or (inner.__doc__ if inner else "") or "").split("\n\n")
    return " ".join(lines[0].split())


def _with_defaults(keys: list[Key], field: FieldInfo, spelling: str) -> list[Key]:
    """``keys`` with the defaults of the instance that the outer section gives, where that isn't the inner's own."""
    if not isinstance(field.default, BaseModel):
        return keys
    values = _flat(field.default.model_dump(mode="json"), spelling + ".")
    return [Key(k.name, k.kind, _shown(values[k.name]) if k.name in values else k.default, k.meaning) for k in keys]


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _inner_section(annotation: Any) -> type[BaseModel] | None:
    while hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    return "see meaning" if field.default_factory is not None else _shown(field.default)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`"
    if isinstance(value, str) and not value:
        return '`""`'
    if isinstance(value, list):
        return "`[" + ", ".join(map(str, value)) + "]`"
    return f"`{value}`"


def _kind(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(item, name)
    ]
    words = _words(field.annotation)
    main, null, _ = words.partition(" or null")
    return f"{main} {', '.join(bounds)}".strip() + null


def _words(annotation: Any) -> str:
    if hasattr(annotation, "__metadata__"):
        return _words(get_args(annotation)[0])
    if hasattr(annotation, "__value__"):
        annotation = annotation.__value__
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        options = [a for a in arguments if a is not type(None)]
        return " or ".join([_words(a) for a in options] + ["null"] * (len(options) < len(arguments)))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_words(arguments[0])}"
    if origin is dict:
        return "mapping"
    return _WORDS.get(annotation, str(annotation))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
