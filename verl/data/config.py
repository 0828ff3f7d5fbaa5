"""The ``data`` section: where prompts come from and how a row becomes token ids."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from verl.common.section import Section

PLACEHOLDER = "{prompt}"
_SET_BY_US = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
}


class DataConfig(Section):
    """Prompts for training and validation."""

    train: str | list[str] | None = None
    """What to train on: files (.jsonl, .json, .parquet; patterns with ``*``), folders saved by ``datasets``, names on
    the Hugging Face hub, ``gym:<task>``; several are joined in the order given. Null when Python code passes rows."""

    val: str | list[str] | None = None
    """What to validate on, as ``train``; null validates on nothing."""

    prompt_key: str = Field("prompt", min_length=1)
    """Column with the prompt: text, or a list of {role, content} messages. A dot reaches into a nested column."""

    ground_truth_key: str | None = Field("ground_truth", min_length=1)
    """Column that the reward compares with, of any type; a dot reaches into a nested column. Null: none is needed."""

    system_prompt: str | None = None
    """System message for every conversation that has none of its own. Needs a chat template."""

    prompt_template: str = PLACEHOLDER
    """Text put around a plain prompt, or around the last user message, where it says ``{prompt}``."""

    chat: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the tokenizer's chat template. ``auto``: if the tokenizer has one."""

    chat_template_kwargs: dict[str, Any] = {}
    """Further variables for the chat template, such as ``enable_thinking``, ``tools`` or ``date_string``."""

    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt, in tokens as the model reads it: template, system message and special tokens included."""

    overlong_prompts: Literal["drop", "error", "left", "right"] = "drop"
    """What becomes of a longer one. ``drop``: left out, counted and named. ``error``: the run doesn't start.
    ``left``: cut on the left, so that the last ``max_prompt_tokens`` ids stay. ``right``: the first ones stay."""

    exclude_val: bool = False
    """Leave training rows out whose prompt is also in ``val``, so that validation is on unseen prompts."""

    shuffle: bool = True
    """Whether each epoch visits the training rows in an order of its own; otherwise in the order of the files."""

    max_train_rows: int | None = Field(None, ge=1)
    """Use only this many rows from the beginning of the training data; null uses all."""

    max_val_rows: int | None = Field(None, ge=1)
    """Use only this many rows from the beginning of the validation data; null uses all."""

    @field_validator("train", "val")
    @classmethod
    def _names_something(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and (not value or any(not entry for entry in value)):
            raise ValueError("an empty list or name of a data set; use null for none")
        return value

    @field_validator("prompt_template")
    @classmethod
    def _template_holds_prompt(cls, value: str) -> str:
        if PLACEHOLDER not in value:
            raise ValueError(f"prompt_template must say {PLACEHOLDER} where the prompt goes, got {value!r}")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _kwargs_are_free(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_SET_BY_US & value.keys()):
            raise ValueError(f"chat_template_kwargs can't set {', '.join(taken)}: the library does")
        return value


class ExampleDataConfig(DataConfig):
    """Answers that are there already, for training and validation."""

    ground_truth_key: str | None = Field(None, min_length=1)
    """Not read: no reward compares answers here."""

    max_example_tokens: int = Field(2048, ge=1)
    """Longest example, in tokens: prompt and answer, or the whole conversation, with the token that ends it. Of a pair
    each side may be that long."""

    overlong_examples: Literal["drop", "error", "right"] = "drop"
    """What becomes of a longer one. ``drop``: left out, counted and named. ``error``: the run doesn't start. ``right``:
    the first tokens stay; one without an answer among them is dropped."""
