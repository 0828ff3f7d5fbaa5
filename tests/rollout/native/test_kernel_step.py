"""The fused step against the step in torch operations, through whole generations; interpreted where there is no GPU."""

from typing import Any

import pytest
import torch

from tests.rollout.engines import assert_same, build, prompt, request
from tests.rollout.native.kernels import DEVICE
from tests.tiny import FAMILIES, tiny_model
from verl.models.causal_lm import CausalLM
from verl.models.fusion import Fusion
from verl.rollout.native.graph import EagerSteps
from verl.rollout.native.kernel_step import KernelStep, _hands_on_what_is_rotated


def with_kernels(family: str, steps: int = 1) -> Any:
    """An engine whose decode and prompts go through the fused step, without graphs."""
    engine = build(family, module=tiny_model(family).to(DEVICE), use_cuda_graph=False)
    engine.generate([request(prompt(4), 1)])
    runner = engine._runner
    runner._step = KernelStep(engine._model, engine._cache, engine._shapes)
    runner._steps = EagerSteps(runner._step, runner._state)
    runner._steps.most = steps
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_generations_equal_those_of_torch_operations(family: str) -> None:
    torch.set_float32_matmul_precision("highest")
    rows = [
        request(prompt(3), 5, seed=1, temperature=1.0),
        request(prompt(9), 4),
        request(prompt(9), 6, seed=2, temperature=1.3),
        request(prompt(5), 4, seed=3, temperature=1.0, top_k=5),
    ]
    engine = with_kernels(family, steps=3)
    assert_same(engine.generate(rows), build(family).generate(rows), tolerance=1e-4)
    engine.check_integrity()


def test_rotary_is_left_to_the_attention_kernel_only_where_nothing_stands_between() -> None:
    module = tiny_model("llama").to(DEVICE)
    assert with_kernels("llama")._runner._step._can_defer
    fusion = Fusion(CausalLM(module))
    plain = fusion._rotaries[0].turned_by

    def then_scaled(rotate: Any) -> Any:
        turned = plain(rotate)
        return lambda *args, **kwargs: (turned(*args, **kwargs)[0] * 2.0, turned(*args, **kwargs)[1])

    fusion._rotaries[0].turned_by = then_scaled  # type: ignore[method-assign]
    assert not _hands_on_what_is_rotated(CausalLM(module), fusion, DEVICE)


def test_the_cache_may_move_between_calls() -> None:
    engine, row = with_kernels("llama"), request(prompt(9), 5)
    before = engine.generate([row])
    engine.sleep()
    hole = torch.zeros(1 << 12, device=DEVICE)
    assert_same(engine.generate([row]), before)
    del hole
