"""The base of every configuration section: strict, frozen, documented where it is declared.

A section lives beside the component that it configures. Each field has a docstring under it, which is its entry
in the generated reference. Types come from the declaration, never from the file format: ``1e-6`` is a float
whether YAML, the command line or Python wrote it, and a YAML ``on`` isn't a number.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """Keyword-only, frozen, refusing keys that it doesn't declare."""

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
    def _bool_is_no_number(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, value in data.items():
                field = cls.model_fields.get(name)
                if isinstance(value, bool) and field is not None and _takes_number_only(field.annotation):
                    raise ValueError(f"key {name!r} takes a number, got the boolean {value!r}")
        return data

    def is_set(self, name: str) -> bool:
        """Whether the user gave this key, rather than leaving its default."""
        return name in self.model_fields_set


def _takes_number_only(annotation: Any) -> bool:
    options = getattr(annotation, "__args__", None) or (annotation,)
    return bool not in options and (int in options or float in options)
