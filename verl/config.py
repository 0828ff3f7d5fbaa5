"""A run's sections from a file, a recipe's name and the command line.

YAML gives the text, the declared fields give the types. Later words win over earlier ones, but a key that is given
twice in one place is an error. Nothing is filled in silently: the effective config is saved with the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf import __version__ as omegaconf_version
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl.algorithms import ALGORITHMS
from verl.common.errors import ConfigError, UnknownName
from verl.trainer.base_sections import GIVEN, Run
from verl.trainer.families import run_class
from verl.trainer.sections import OnPolicyRun


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run that ``source`` (a YAML file or a recipe's name) and ``key.path=value`` words describe.

    Raises ConfigError with every problem found: unknown, misplaced, missing or repeated keys, wrong types,
    sizes that can't be together.
    """
    sections = read_sections(source, overrides)
    kind = _kind(sections)
    missing = [f"missing: {line}" for path, line in kind.must_say.items() if not _says(sections, path)]
    try:
        run = kind.parse(sections)
    except ConfigError as error:
        covered = {f"{path.partition('.')[0]}: Field required" for path in kind.must_say}
        others = [line for line in str(error).split("\n") if line not in covered]
        raise ConfigError("\n".join([*missing, *others])) from None
    if missing:
        raise ConfigError("\n".join(missing))
    said: dict[str, Any] = {"model.path": run.model.path, "model.tokenizer": run.model.tokenizer}
    said |= {"data.train": run.data.train, "data.val": run.data.val}
    if objects := [key for key, value in said.items() if value == GIVEN]:
        raise ConfigError(
            f"{', '.join(objects)} was an object in the Python program of that run: name a file or folder"
        )
    return run


_BY_NAME = ("algorithm", "rollout")
"""Sections that may be one word: their ``name``."""


def _kind(sections: Mapping[str, Any]) -> type[Run]:
    """The kind of run that ``algorithm.name`` asks for; on-policy where it isn't there or isn't known."""
    algorithm = sections.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    return run_class(name) if isinstance(name, str) and name in ALGORITHMS else OnPolicyRun


def _says(sections: Mapping[str, Any], paths: str) -> bool:
    """Whether one of the dotted ``paths`` has a value, or something of another form that parsing will explain."""
    for path in paths.split("|"):
        value: Any = sections
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else value
        if value not in (None, {}, ""):
            return True
    return False


def read_sections(source: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain nested mapping, before it is validated. ``${here:}`` in it is the folder of the file itself."""
    path = _find(source)
    origin = str(path)
    _register_here(path.resolve().parent)
    try:
        loaded = OmegaConf.create(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        known = ", ".join(sorted(recipes()))
        raise ConfigError(f"there is no config file {origin!r}; recipes, named without a suffix: {known}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {origin!r} can't be read: {error}") from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{origin} is no valid YAML: {error}") from error
    except AssertionError:  # omegaconf's own, of a file that holds one number
        loaded = None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{origin} must hold sections (model:, data:, …), not a list or a single value")
    try:
        given = parse_overrides(overrides)
        _expand_names(loaded, given)
        plain: Any = OmegaConf.to_container(OmegaConf.merge(loaded, given), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{origin}: {error}") from error
    except TypeError:
        raise ConfigError(f"{origin}: {_unlike(loaded, given)}") from None
    return {str(name): value if value is not None else {} for name, value in plain.items()}


def _unlike(loaded: DictConfig, given: DictConfig, above: str = "") -> str:
    """The first key where one has keys and the other a list, which can't be merged."""
    for name in given:
        key, ours, theirs = above + str(name), loaded.get(name), given.get(name)
        if isinstance(ours, DictConfig) and isinstance(theirs, DictConfig):
            if found := _unlike(ours, theirs, f"{key}."):
                return found
        elif isinstance(ours, DictConfig) and isinstance(theirs, ListConfig):
            first = str(next(iter(ours), "name"))
            return f"{key} takes keys, such as {key}.{first}=.., got the list {theirs}"
        elif isinstance(ours, ListConfig) and isinstance(theirs, DictConfig):
            return f"{key} takes a list, such as {key}={ours}, got keys: {theirs}"
    return ""


def recipes() -> dict[str, Path]:
    """Built-in recipes by name."""
    return {
        Path(str(f)).stem: Path(str(f)) for f in files("verl").joinpath("recipes").iterdir() if str(f).endswith(".yaml")
    }


def _register_here(folder: Path) -> None:
    def here() -> str:
        return str(folder)

    # omegaconf 2.4 renamed the function; before, the new name meant another one
    is_renamed = tuple(int(part) for part in omegaconf_version.split(".")[:2]) >= (2, 4)
    name = "register_resolver" if is_renamed else "register_new_resolver"
    getattr(OmegaConf, name)("here", here, replace=True)


def _find(source: str | Path) -> Path:
    path = Path(source)
    if path.suffix or path.exists():
        return path
    known = recipes()
    if str(source) not in known:
        raise UnknownName("recipe (or config file)", str(source), known)
    return known[str(source)]


def _expand_names(loaded: DictConfig, given: DictConfig) -> None:
    """``algorithm: ppo`` is ``algorithm: {name: ppo}``: an override of another of its keys must not lose the name."""
    for section in _BY_NAME:
        value = OmegaConf.to_container(loaded).get(section)  # type: ignore[union-attr]  # it is a mapping
        if isinstance(value, str) and OmegaConf.is_dict(given.get(section)):
            loaded[section] = {"name": value}


def parse_overrides(words: Sequence[str]) -> DictConfig:
    """``key.path=value`` words as nested keys. Raises ConfigError for a malformed, repeated or overlapping one."""
    seen: dict[str, str] = {}
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is no override: write key.path=value, such as actor.optim.lr=1e-6")
        if key in seen:
            raise ConfigError(f"key {key!r} is given twice: {seen[key]!r} and {word!r}")
        clash = next((k for k in seen if k.startswith(key + ".") or key.startswith(k + ".")), None)
        if clash is not None:
            raise ConfigError(f"keys {clash!r} and {key!r} overlap: {seen[clash]!r} and {word!r}")
        try:
            OmegaConf.from_dotlist([word])
        except (YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"the value of {word!r} is no valid YAML; quote it: {error}") from error
        seen[key] = word
    return OmegaConf.from_dotlist(list(words))
