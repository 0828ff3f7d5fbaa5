"""The native engine's own keys."""

from __future__ import annotations

from pydantic import Field, model_validator
from typing_extensions import Self

from verl.rollout.config import RolloutConfig


class Config(RolloutConfig):
    """Sizes of the paged cache and of a step."""

    block_size: int = Field(default=16, ge=1)
    """Tokens in one block of the cache; whole blocks of equal prompts are shared."""
    cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the cache holds; None takes what the requests can use, within memory_frac."""
    memory_frac: float = Field(default=0.6, gt=0, lt=1)
    """Share of the device memory free at that moment that the cache may take when cache_tokens is None."""
    max_running_rows: int = Field(default=1024, ge=1)
    """Responses decoded at the same time; the others wait."""
    max_prefill_tokens: int = Field(default=12288, ge=1)
    """Prompt tokens computed in one step; a longer prompt is computed in pieces."""
    prefix_cache: bool = True
    """Keep and share the blocks of equal prompt beginnings until the weights change."""
    use_cuda_graph: bool = True
    """On CUDA, decode through captured graphs; no effect on the CPU."""

    @model_validator(mode="after")
    def _a_block_fits(self) -> Self:
        if self.cache_tokens is not None and self.cache_tokens < self.block_size:
            raise ValueError(
                f"cache_tokens = {self.cache_tokens} holds no block of block_size = {self.block_size} tokens: "
                "raise the one or lower the other"
            )
        return self
