"""Small rollout engines, requests, and the slow obvious reference that they are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny import tiny_model
from verl.models.causal_lm import CausalLM
from verl.rollout import ROLLOUT_ENGINES
from verl.rollout.base import Request, Response, SamplingParams

EOS = 2
BLOCK = 4


def build(
    family: str = "llama",
    engine: str = "native",
    *,
    tokenizer: Any = None,
    eos: Sequence[int] = (EOS,),
    module: PreTrainedModel | None = None,
    **config: Any,
) -> Any:
    """An engine over a tiny model; ``config`` are its keys (blocks of 4 tokens unless it says otherwise)."""
    kind = ROLLOUT_ENGINES.load(engine)
    if engine == "native":
        config = {"block_size": BLOCK, **config}
    return kind(CausalLM(module or tiny_model(family)), tokenizer, kind.Config(**config), eos)


def request(
    prompt: Sequence[int], tokens: int = 8, seed: int = 0, temperature: float = 0.0, **sampling: Any
) -> Request:
    """A request, greedy unless it says otherwise."""
    settings = SamplingParams(max_new_tokens=tokens, temperature=temperature, **sampling)
    return Request(prompt_ids=list(prompt), seed=seed, sampling=settings)


def prompt(length: int, first: int = 5) -> list[int]:
    """Different ids from ``first``, none of them an end-of-sequence id."""
    return [3 + (first - 3 + 7 * i) % 61 for i in range(length)]


def full_log_probs(module: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[N, V] float32 log-probs of the module's own forward over one unpadded row."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return (logits / temperature).log_softmax(-1)


def greedy(module: PreTrainedModel, start: Sequence[int], tokens: int, eos: Sequence[int] = (EOS,)) -> list[int]:
    """The likeliest token again and again, each from a full forward over the whole row."""
    ids = list(start)
    while len(ids) < len(start) + tokens:
        ids.append(int(full_log_probs(module, ids)[-1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(start) :]


def response_log_probs(
    module: PreTrainedModel, start: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Log-prob of each response token by one full forward."""
    log_probs = full_log_probs(module, [*start, *response], temperature)[len(start) - 1 : -1]
    return log_probs[torch.arange(len(response)), torch.tensor(list(response))].tolist()


def ids_of(responses: Sequence[Response]) -> list[list[int]]:
    """Response ids of each."""
    return [response.response_ids for response in responses]


def assert_same(a: Sequence[Response], b: Sequence[Response], tolerance: float = 1e-5) -> None:
    """Equal ids and finish reasons, log-probs within ``tolerance``."""
    assert ids_of(a) == ids_of(b)
    assert [x.finish_reason for x in a] == [x.finish_reason for x in b]
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(torch.tensor(x.log_probs), torch.tensor(y.log_probs), atol=tolerance, rtol=0)
