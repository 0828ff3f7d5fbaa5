import pytest
import torch

from tests.tiny import tiny_model
from verl.models.causal_lm import CausalLM
from verl.rollout.native.cache import KVCache, LayerShape, affordable_tokens, layer_shapes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("gpt2", LayerShape(2, 16, 16, torch.float32)),
        ("gemma2", LayerShape(1, 16, 16, torch.float32, has_softcap=True)),
    ],
)
def test_shapes_are_seen_not_guessed(family: str, shape: LayerShape) -> None:
    assert layer_shapes(CausalLM(tiny_model(family)), CPU) == {0: shape, 1: shape}


def test_writes_go_to_their_slots_and_padding_is_zero() -> None:
    cache = KVCache({3: LayerShape(1, 2, 3, torch.float32)}, num_blocks=2, block_size=2, device=CPU)
    keys, values = cache.write(3, torch.tensor([5, 2]), torch.ones(2, 1, 2), torch.full((2, 1, 3), 2.0))
    assert keys.shape == (6, 1, 2) and values.shape == (6, 1, 3)
    assert keys[:, 0, 0].tolist() == [0, 0, 1, 0, 0, 1] and values[:, 0, 2].tolist() == [0, 0, 2, 0, 0, 2]


def test_affordable_tokens_are_a_share_of_free_memory() -> None:
    shapes = {i: LayerShape(2, 8, 8, torch.bfloat16) for i in range(4)}
    assert sum(s.bytes_per_token for s in shapes.values()) == 256
    half, tenth = affordable_tokens(shapes, CPU, 0.5), affordable_tokens(shapes, CPU, 0.1)
    assert half > 3 * tenth > 0
    assert affordable_tokens(shapes, CPU, 0.5, held_bytes=1 << 50) > 1 << 40  # half of it, at 256 bytes a token
