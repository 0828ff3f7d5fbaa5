"""The policy as it was before its first update, kept as the log-probs that it gave: no second model is held.

In come answers; their log-probs are computed once, by the actor's own engine while it still is the starting policy, and
kept in a folder of the run. Knows nothing of losses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl.batch import Batch
from verl.common.errors import StaleWeights
from verl.common.files import folder_written_aside
from verl.data.examples import Answer, answer_key, answers_batch

log = logging.getLogger(__name__)

FILE = "log_probs.safetensors"
_CHUNK_TOKENS = 1 << 20
_SAME = 1e-2
"""Largest mean difference, in nats a token, between two computations of the same log-probs: bfloat16 is that coarse."""


class StartingPolicy:
    """Log-probs of answers under the starting policy.

    engine  the actor's
    folder  where they are kept; what is there is used if the engine gives the same for one of its answers
    """

    name = "reference"
    writes = "ref_log_probs"

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self._known: dict[bytes, Tensor] = {}

    def infer(self, batch: Batch) -> None:
        """Write ``ref_log_probs``. Raises StaleWeights for an answer whose log-probs weren't computed in time."""
        found = [self._known.get(key) for key in _keys(batch)]
        missing = sum(piece is None for piece in found)
        if missing:
            raise StaleWeights(
                f"the log-probs of {missing} answers under the starting policy weren't computed before its first "
                "update: set trainer.total_steps or trainer.epochs to all the steps that the run is to make"
            )
        pieces = [piece for piece in found if piece is not None]
        batch.put(self.writes, torch.cat(pieces) if pieces else torch.empty(0))

    def prepare(self, answers: Iterable[Answer]) -> None:
        """Compute what isn't known yet of ``answers``. The actor must still be the starting policy."""
        wanted = {answer.key: answer for answer in answers}
        if not self._known:
            self._known = self._load(wanted)
        missing = [answer for key, answer in wanted.items() if key not in self._known]
        if not missing:
            return
        log.info("computing the starting policy's log-probs of %d answers, once", len(missing))
        for chunk in _chunks(missing):
            self._known |= self._compute(chunk)
        self._save()

    def _compute(self, answers: Sequence[Answer]) -> dict[bytes, Tensor]:
        batch = answers_batch(answers)
        values = self.engine.infer(batch, "log_probs").split(batch.lengths("response_ids").tolist())
        return {answer.key: piece.clone() for answer, piece in zip(answers, values, strict=True)}

    def _save(self) -> None:
        keys, pieces = list(self._known), list(self._known.values())
        tensors = {
            "keys": torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8),
            "lengths": torch.tensor([len(piece) for piece in pieces], dtype=torch.int64),
            "log_probs": torch.cat(pieces),
        }
        with folder_written_aside(self.folder, replace=True) as aside:
            save_file(tensors, aside / FILE)

    def _load(self, wanted: dict[bytes, Answer]) -> dict[bytes, Tensor]:
        """What the folder holds, unless it is of another policy."""
        path = self.folder / FILE
        if not path.is_file():
            return {}
        tensors = load_file(path)
        raw = tensors["keys"].numpy().tobytes()
        keys = [raw[i : i + 16] for i in range(0, len(raw), 16)]
        known = dict(zip(keys, tensors["log_probs"].split(tensors["lengths"].tolist()), strict=True))
        probe = next((key for key in wanted if key in known), None)
        if probe is None:
            return {}
        again = self._compute([wanted[probe]])[probe]
        if len(again) and float((again - known[probe]).abs().mean()) > _SAME:
            log.warning("%s holds log-probs of another starting policy: they are computed again", path)
            return {}
        return known


def _keys(batch: Batch) -> list[bytes]:
    prompts = batch["prompt_ids"].split(batch.lengths("prompt_ids").tolist())
    responses = batch["response_ids"].split(batch.lengths("response_ids").tolist())
    return [answer_key(p.tolist(), r.tolist()) for p, r in zip(prompts, responses, strict=True)]


def _chunks(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    chunk: list[Answer] = []
    tokens = 0
    for answer in answers:
        chunk.append(answer)
        tokens += len(answer)
        if tokens >= _CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk
