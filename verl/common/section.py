"""The base of every configuration section: strict, frozen, documented where it is declared.

A section lives beside the component that it configures. Each field has a docstring under it, which is its entry
in the generated reference. Types come from the declaration, never from the file format: ``1e-6`` is a float
whether YAML, the command line, the environment or Python wrote it, and a YAML ``on`` isn't a number.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from verl.common.errors import ConfigError, did_you_mean

_NULL_WORDS = {"null", "~"}
_WORDS_OF_BOOL = {True: {"on", "yes", "y", "true"}, False: {"off", "no", "n", "false"}}


class Section(BaseModel):
    """Keyword-only, frozen, refusing keys that it doesn't declare.

    A field's value may come as the declared type or as text for it (``"1e-6"``, ``"on"``, ``"null"``), at any depth
    of lists, mappings and unions; a boolean is never taken for a number, nor a number with a fraction for text.
    """

    formerly: ClassVar[dict[str, str]] = {}
    """Keys that earlier versions knew -> what says it now; part of the message that they are unknown."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _only_declared_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and cls.model_config.get("extra") == "forbid":
            known = {key for name in cls.model_fields for key in _spellings(cls, name)}
            if unknown := [str(key) for key in data if key not in known]:
                hints = "; ".join(f"unknown key {key!r}{cls._hint(key, known)}" for key in unknown)
                stop = "" if hints.endswith("?") else "."
                message = f"{hints}{stop} {cls.__name__} takes: {', '.join(sorted(known))}"
                raise PydanticCustomError("unknown_key", "{message}", {"message": message, "unknown": unknown})
        return data

    @classmethod
    def _hint(cls, key: str, known: AbstractSet[str]) -> str:
        return f": {cls.formerly[key]}" if key in cls.formerly else did_you_mean(key, known)

    @field_validator("*", mode="before")
    @classmethod
    def _as_declared(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return as_declared(value, cls.model_fields[info.field_name].annotation)

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """The section that ``values`` describe. ``where`` is its own dotted path, for messages.

        Raises ConfigError listing every wrong key with its dotted path, its value and what is allowed; an unknown key
        comes with the nearest one of its section, or with the place where a key of that name is known.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(cls, problem, where) for problem in error.errors())) from None

    def is_set(self, name: str) -> bool:
        """Whether the user gave this key, rather than leaving its default."""
        return name in self.model_fields_set


def key_paths(section: type[BaseModel]) -> Iterator[str]:
    """Every key of ``section`` and of the sections in it, as the user spells them, dotted."""
    for name, field in section.model_fields.items():
        spelling = _spellings(section, name)[0]
        yield spelling
        for inner in _sections_in(field.annotation):
            yield from (f"{spelling}.{key}" for key in key_paths(inner))


def as_declared(value: Any, annotation: Any) -> Any:
    """``value`` in the form that ``annotation`` declares, where only the file format kept it from it.

    What stays wrong is left for the type's own check. Raises ValueError for a boolean where a number or text is
    declared, and for a number with a fraction, a date or a time where text is: their spelling is lost.
    """
    annotation = _plain(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _as_one_of(value, [_plain(option) for option in arguments])
    if origin is Literal:
        return _as_literal(value, arguments)
    if annotation in _SCALARS:
        return _SCALARS[annotation](value)
    if isinstance(value, Mapping) and arguments and _is_kind(origin, Mapping):
        return {as_declared(k, arguments[0]): as_declared(v, arguments[1]) for k, v in value.items()}
    if _is_items(value) and arguments and (_is_kind(origin, Sequence) or _is_kind(origin, AbstractSet)):
        if origin is tuple and Ellipsis not in arguments and len(arguments) == len(value):
            return [as_declared(item, kind) for item, kind in zip(value, arguments, strict=True)]
        return [as_declared(item, arguments[0]) for item in value]
    return value


def _as_int(value: Any) -> Any:
    _refuse_bool(value, "a number")
    if isinstance(value, str):
        try:
            number = float(value)
            return int(number) if number.is_integer() and abs(number) < 2**53 and not _is_digits(value) else value
        except ValueError:
            return value
    return value


def _as_float(value: Any) -> Any:
    _refuse_bool(value, "a number")
    return value


def _as_text(value: Any) -> Any:
    _refuse_bool(value, "text")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) or type(value).__module__ == "datetime":
        raise ValueError(f"takes text, but got the {type(value).__name__} {value!s}: put it in quotes")
    if isinstance(value, Mapping):
        raise ValueError(f"takes text, but got {value!r} (YAML reads text with a colon as keys: put it in quotes)")
    return value


_SCALARS: dict[Any, Callable[[Any], Any]] = {int: _as_int, float: _as_float, str: _as_text, Path: _as_text}


def _as_one_of(value: Any, options: list[Any]) -> Any:
    """The first reading that an option of a union allows; numbers before text, so that ``5`` and ``"5"`` agree."""
    if value is None or (bool in options and isinstance(value, bool)):
        return value
    if isinstance(value, str) and value.lower() in _NULL_WORDS and type(None) in options and str not in options:
        return None
    if isinstance(value, str) and str in options:
        return _number_in(value, options)
    if isinstance(value, BaseModel):
        return value
    problem: ValueError | None = None
    for option in sorted(options, key=_breadth):
        try:
            read = as_declared(value, option)
        except ValueError as error:
            problem = problem or error
            continue
        if read is not value or _takes(option, read):
            return read
    if problem is not None:
        raise problem
    return value


def _number_in(text: str, options: list[Any]) -> Any:
    for kind, read in ((int, _as_int(text)), (float, text)):
        if kind in options:
            try:
                return kind(read)
            except ValueError:
                continue
    return text


def _as_literal(value: Any, allowed: tuple[Any, ...]) -> Any:
    """YAML's ``off`` for a declared ``"off"``, and ``"1"`` for a declared ``1``."""
    if any(type(value) is type(option) and value == option for option in allowed):
        return value
    if isinstance(value, bool):
        words = [option for option in allowed if isinstance(option, str) and option in _WORDS_OF_BOOL[value]]
        if len(words) == 1:
            return words[0]
        _refuse_bool(value, f"one of {', '.join(map(repr, allowed))}")
    if isinstance(value, str | int):
        return next((option for option in allowed if str(option) == str(value)), value)
    return value


def _refuse_bool(value: Any, wanted: str) -> None:
    if isinstance(value, bool):
        raise ValueError(
            f"takes {wanted}, but got the boolean {value} (YAML reads on, off, yes and no as booleans: quote text)"
        )


def _plain(annotation: Any) -> Any:
    """``annotation`` without Annotated and type aliases."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        else:
            return annotation


def _breadth(option: Any) -> int:
    order = [bool, int, float]
    return order.index(option) if option in order else 4 if option is str else 3


def _takes(option: Any, value: Any) -> bool:
    kind = get_origin(option) or option
    if kind is Literal:
        return value in get_args(option)
    if kind is int and isinstance(value, float):
        return value.is_integer()
    if kind is float:
        return isinstance(value, int | float)
    if kind in (list, tuple, set, frozenset, Sequence):
        return _is_items(value)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_kind(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_items(value: Any) -> bool:
    return isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes)


def _is_digits(text: str) -> bool:
    return text.strip().lstrip("+-").isdigit()


def _spellings(section: type[BaseModel], name: str) -> list[str]:
    """What the user may type for the field ``name``."""
    field = section.model_fields[name]
    alias = field.validation_alias if field.validation_alias is not None else field.alias
    spellings = [a for a in alias.choices if isinstance(a, str)] if isinstance(alias, AliasChoices) else [alias]
    by_name = section.model_config.get("validate_by_name") or section.model_config.get("populate_by_name")
    names = [spelling for spelling in spellings if isinstance(spelling, str)]
    return names + [name] if by_name or not names else names


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    annotation = _plain(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def _explain(section: type[BaseModel], problem: Any, where: str) -> str:
    """One line for one of pydantic's problems."""
    path = ".".join([where] * bool(where) + [str(part) for part in problem["loc"]])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "unknown_key":
        places = list(key_paths(section))
        for key in problem["ctx"]["unknown"]:
            elsewhere = [place for place in places if place.rpartition(".")[2] == key]
            if elsewhere:
                message += f". {key!r} is known as {', '.join(elsewhere)}"
    elif problem["type"] != "missing" and not _names_value(message, problem["input"]):
        message += f", got {problem['input']!r}"
    return f"{path}: {message}" if path else message


def _names_value(message: str, value: Any) -> bool:
    """Whether ``message`` says what was given; a whole section is never repeated."""
    is_quoted = isinstance(value, str) and repr(value) in message
    return is_quoted or " got " in message or isinstance(value, Mapping)
