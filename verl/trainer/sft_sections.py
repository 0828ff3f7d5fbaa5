"""The sections of a supervised run."""

from __future__ import annotations

from typing import ClassVar

from verl.data.demonstrations import DemonstrationDataConfig
from verl.trainer.offline_sections import OfflineRun


class SFTRun(OfflineRun):
    """A whole run of the supervised family (SFT)."""

    family: ClassVar[str] = "supervised"

    data: DemonstrationDataConfig
    """Conversations to learn from and to validate on."""

    def idle_keys(self) -> dict[str, str]:
        """As in Run."""
        found = super().idle_keys()
        found["reference"] = f"algorithm {self.algorithm.name!r} uses no reference"
        found |= {
            f"data.{key}": "the limit is that of whole examples, data.max_example_tokens"
            for key in ("max_prompt_tokens", "overlong_prompts")
        }
        return found
