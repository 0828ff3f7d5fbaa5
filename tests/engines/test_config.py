from __future__ import annotations

import pytest

from verl.engines.config import OptimConfig


def test_warm_up_then_constant() -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=4)
    assert [optim.lr_at(step, 10) for step in (1, 2, 4, 5, 10)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_linear_starts_at_the_peak_and_heads_for_0() -> None:
    optim = OptimConfig(lr=1.0, schedule="linear")
    assert [optim.lr_at(step, 10) for step in (1, 6, 10, 12)] == pytest.approx([1.0, 0.5, 0.1, 0.0])
    warm = OptimConfig(lr=1.0, schedule="linear", warmup_steps=2)
    assert [warm.lr_at(step, 6) for step in (1, 2, 3, 6)] == pytest.approx([0.5, 1.0, 1.0, 0.25])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    optim = OptimConfig(lr=2.0, schedule="cosine", warmup_steps=2)
    assert optim.lr_at(2, 10) == optim.lr_at(3, 10) == 2.0
    assert optim.lr_at(7, 10) == pytest.approx(1.0)
    assert 0 < optim.lr_at(10, 10) < 0.08


def test_betas_are_read_in_any_form() -> None:
    assert OptimConfig.parse({"betas": ["0.8", "9e-1"]}).betas == OptimConfig(betas=(0.8, 0.9)).betas == [0.8, 0.9]
