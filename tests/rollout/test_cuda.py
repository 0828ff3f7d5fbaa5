"""The native engine's CUDA half against its CPU half and the module's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rollout.engines import assert_same, build, full_log_probs, greedy, ids_of, prompt, request
from tests.tiny import FAMILIES, tiny_model, word_tokenizer
from verl.models.attention import Scoring
from verl.rollout.native.cache import KVCache, LayerShape
from verl.rollout.native.paged_attention import GatherAttention, VarlenAttention
from verl.rollout.native.sampler import gumbel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
MIXTURES_OF_EXPERTS = {"qwen3_moe"}  # their routing may wait for the host, which no graph can hold


def on_cuda(family: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    return build(family, module=tiny_model(family).to(CUDA, dtype), **config)


def paged(rows: int, longest: int, size: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Any:
    """Random keys and values of ``rows`` rows over blocks in random order."""
    width = -(-longest // size)
    tables = (torch.randperm(rows * width) + 1).reshape(rows, width).to(CUDA)
    slots = (rows * width + 1) * size
    keys = torch.randn(slots, heads, key_dim, device=CUDA, dtype=dtype)
    return tables, keys, torch.randn(slots, heads, value_dim, device=CUDA, dtype=dtype)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("starts", [[0, 0, 0], [0, 16, 7]])
def test_varlen_prefill_equals_gathered_attention(window: int | None, starts: list[int]) -> None:
    torch.manual_seed(0)
    queries, size = [9, 3, 20], 4
    tables, keys, values = paged(3, 27, size, 2, 64, 64, torch.bfloat16)
    query = torch.randn(sum(queries), 4, 64, device=CUDA, dtype=torch.bfloat16)
    all_slots = [(table[:, None] * size + torch.arange(size, device=CUDA)).flatten() for table in tables]
    ends = [start + n for start, n in zip(starts, queries, strict=True)]
    slots = torch.cat([s[a:b] for s, a, b in zip(all_slots, starts, ends, strict=True)])
    key_slots = torch.cat([s[:b] for s, b in zip(all_slots, ends, strict=True)]) if any(starts) else None
    new = (keys[slots], values[slots])
    cache = KVCache({0: LayerShape(2, 64, 64, torch.bfloat16)}, len(keys) // size - 1, size, CUDA)
    cache.write(0, torch.arange(len(keys), device=CUDA), keys, values)
    varlen = VarlenAttention(cache, slots, key_slots, starts, queries)
    out = varlen(0, query, *new, Scoring(0.2, window))
    gather = GatherAttention(cache, slots, tables, starts, queries)
    expected = gather.attend(query.float(), keys.float(), values.float(), Scoring(0.2, window))
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0)


def test_noise_is_the_same_on_both_devices() -> None:
    low, high, index = (torch.randint(-(2**31), 2**31 - 1, (50,), dtype=torch.int32) for _ in range(3))
    here = gumbel(low, high, index, 5000)
    torch.testing.assert_close(
        gumbel(low.to(CUDA), high.to(CUDA), index.to(CUDA), 5000).cpu(), here, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_cuda_graph", [True, False])
def test_float32_equals_the_cpu(family: str, use_cuda_graph: bool) -> None:
    torch.set_float32_matmul_precision("highest")  # no TF32
    rows = [request(prompt(n), 9 + n, seed=n, temperature=float(n % 2)) for n in (1, 3, 4, 5, 8, 13)]
    engine = on_cuda(family, use_cuda_graph=use_cuda_graph)
    assert_same(engine.generate(rows), build(family).generate(rows), tolerance=1e-3)
    engine.check_integrity()
    if use_cuda_graph and family not in MIXTURES_OF_EXPERTS:
        assert engine._runner._steps._eager is None and engine._runner._steps._graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_log_probs_are_close_to_a_full_forward(family: str) -> None:
    rows = [request(prompt(n), 24, seed=n, temperature=1.0) for n in (3, 8, 17, 17)]
    plain = tiny_model(family).to(torch.bfloat16).float()
    differences = []
    for row, response in zip(rows, on_cuda(family, torch.bfloat16).generate(rows), strict=True):
        ids = [*row.prompt_ids, *response.response_ids]
        expected = full_log_probs(plain, ids)[len(row.prompt_ids) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(response.response_ids)[:, None])[:, 0]
        differences.append((chosen - torch.tensor(response.log_probs)).abs())
    assert float(torch.cat(differences).mean()) < 0.1


def test_graphs_see_in_place_updates_and_survive_sleep() -> None:
    engine, other, row = on_cuda(), tiny_model("llama", seed=4), request(prompt(9), 20)
    engine.generate([row])
    runner, graphs = engine._runner, dict(engine._runner._steps._graphs)
    engine.load_weights(other.state_dict().items(), version=1)
    assert ids_of(engine.generate([row])) == [greedy(other, row.prompt_ids, 20)]
    engine.sleep()
    hole = torch.zeros(1 << 22, device=CUDA)  # the cache comes back elsewhere
    assert ids_of(engine.generate([row])) == [greedy(other, row.prompt_ids, 20)]
    del hole
    assert engine._runner is runner and runner._steps._graphs == graphs  # none was captured again
    module = engine._model.module
    for parameter in module.parameters():  # moved: the captured graphs would read freed memory
        parameter.data = parameter.data.clone()
    engine.weights_changed(2)
    assert ids_of(engine.generate([row])) == [greedy(other, row.prompt_ids, 20)]


def test_rows_that_end_between_two_looks_of_the_host() -> None:
    """Stop strings, minimum lengths, truncation, the end of learned positions, and blocks that run out."""
    tokenizer = word_tokenizer()
    rows = [
        request(prompt(5), 30, stop=("w1",)),
        request(prompt(6), 30, seed=1, temperature=1.0, min_new_tokens=11),
        request(prompt(7), 30, seed=2, temperature=1.3, top_k=5, top_p=0.9, min_p=0.01),
        request(prompt(253), 3, seed=3, temperature=1.0, ignore_eos=True),
        *[request(prompt(9), 13, seed=seed, temperature=1.0) for seed in range(20)],
    ]
    expected = build("gpt2", tokenizer=tokenizer).generate(rows)
    for config in ({}, {"cache_tokens": 272}, {"max_running_rows": 3}):
        engine = on_cuda("gpt2", tokenizer=tokenizer, **config)
        assert_same(engine.generate(rows), expected, tolerance=1e-3)
        engine.check_integrity()
