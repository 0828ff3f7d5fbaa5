from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from verl.common.errors import ShapeError  # noqa: E402
from verl.models.fused_kernels import gated, rms_norm, rotate  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # Triton's interpreter cuts bfloat16 off
DTYPES = [torch.float32, HALF]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_rounded_alike(ours: Tensor, theirs: Tensor, differing_frac: float = 0.01) -> None:
    """Equal within one rounding everywhere, and nearly everywhere exactly where rounding is coarse."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    steps = (ours.float() - theirs.float()).abs() / (theirs.float().abs() * torch.finfo(theirs.dtype).eps + 1e-6)
    assert float(steps.max()) <= (8 if theirs.dtype == torch.float32 else 1)
    if theirs.dtype != torch.float32:
        assert float((ours != theirs).float().mean()) < differing_frac


def plain_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool, rounds_first: bool) -> Tensor:
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if rounds_first:
        return (1 + weight if plus_one else weight) * wide.to(x.dtype)
    return (wide * (1 + weight.float() if plus_one else weight.float())).to(x.dtype)


def test_norm_of_known_numbers() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], device=DEVICE)
    weight = torch.tensor([1.0, -2.0], device=DEVICE)
    # root of the mean square of (3, 4) is sqrt(12.5)
    out = rms_norm(x, weight, 0.0 + 1e-12, plus_one=False, rounds_first=False)
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.848528, -2.262742], [0.0, 0.0]]))
    out = rms_norm(x, weight, 12.5, plus_one=True, rounds_first=False)  # eps halves the square
    torch.testing.assert_close(out.cpu(), torch.tensor([[1.2, -0.8], [0.0, 0.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one, rounds_first", [(False, True), (True, False), (False, False), (True, True)])
@pytest.mark.parametrize("shape", [(1, 5, 96), (3, 2500), (0, 8)])
def test_norm(shape: tuple[int, ...], plus_one: bool, rounds_first: bool, dtype: torch.dtype) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    x[:1] *= 1e-3  # eps counts
    out = rms_norm(x, weight, 1e-6, plus_one=plus_one, rounds_first=rounds_first)
    assert out.is_contiguous()
    if x.numel():
        assert_rounded_alike(out, plain_norm(x, weight, 1e-6, plus_one, rounds_first))


def test_the_place_of_rounding_shows() -> None:
    """Were one variant the same as another in half precision, the tests above could not tell them apart."""
    x, weight = normal(4, 128, dtype=HALF), normal(128, dtype=HALF, seed=1)
    first, last = (rms_norm(x, weight, 1e-6, plus_one=False, rounds_first=early) for early in (True, False))
    assert 0.05 < float((first != last).float().mean()) < 0.9


def test_norm_of_heads_inside_a_wider_matrix() -> None:
    wide, weight = normal(1, 7, 5 * 16), normal(16, seed=1)
    heads = wide[..., 16:64].view(1, 7, 3, 16)  # rows of three heads, five apart
    for x in (heads, heads.transpose(1, 2), wide.view(7, 5, 16)[::2, ::2], heads[0, :, :, ::1]):
        out = rms_norm(x, weight, 1e-6, plus_one=False, rounds_first=True)
        assert out.is_contiguous()
        assert_rounded_alike(out, plain_norm(x, weight, 1e-6, False, True))


def test_norm_of_anything_else_is_copied_first() -> None:
    x, weight = normal(3, 4, 5, 16)[::2, ::2, ::2], normal(8, seed=1)
    for odd in (x[..., :8], x[..., ::2], normal(8, 6).t()):
        out = rms_norm(odd, weight, 1e-6, plus_one=True, rounds_first=False)
        assert_rounded_alike(out, plain_norm(odd, weight, 1e-6, True, False))


def test_norm_refuses_another_width() -> None:
    with pytest.raises(ShapeError, match="32 channels"):
        rms_norm(normal(2, 32), normal(16), 1e-6, plus_one=False, rounds_first=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_halves_of_one_matrix(activation: str, dtype: torch.dtype) -> None:
    both = 3 * normal(3, 2 * 1100, dtype=dtype)
    gate, up = both.chunk(2, -1)
    active = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
    out = gated(gate, up, activation)
    assert out.is_contiguous()
    assert_rounded_alike(out, active * up, 0.1)  # torch's 1 + tanh(x) cancels where x is far below 0


def test_gated_of_known_numbers() -> None:
    gate, up = torch.tensor([[0.0, 1.0, -20.0]], device=DEVICE), torch.tensor([[5.0, 2.0, 1.0]], device=DEVICE)
    torch.testing.assert_close(gated(gate, up, "silu").cpu(), torch.tensor([[0.0, 1.462117, -4.122307e-8]]))
    torch.testing.assert_close(gated(gate, up, "gelu_tanh").cpu(), torch.tensor([[0.0, 1.682384, 0.0]]))
    assert gated(gate[:0], up[:0], "silu").shape == (0, 3)


def test_gated_refuses_two_shapes() -> None:
    with pytest.raises(ShapeError, match=r"\[2, 8\] and \[2, 4\]"):
        gated(normal(2, 8), normal(2, 4), "silu")


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    turned, passed = x[..., :size], x[..., size:]
    half = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
    out = turned * cos[:, None] + half * sin[:, None]
    return torch.cat([out.to(x.dtype), passed], -1)


@pytest.mark.parametrize("dtype, angle_dtype", [*zip(DTYPES, DTYPES, strict=True), (HALF, torch.float32)])
@pytest.mark.parametrize("dim, rotated", [(32, 32), (48, 48), (80, 32), (16, 2)])
def test_rotate(dim: int, rotated: int, dtype: torch.dtype, angle_dtype: torch.dtype) -> None:
    query, key = normal(3, 5, dim, dtype=dtype), normal(3, 2, dim, dtype=dtype, seed=1)
    cos, sin = (normal(3, rotated, dtype=angle_dtype, seed=seed) for seed in (2, 3))
    for ours, x in zip(rotate(query, key, cos, sin), (query, key), strict=True):
        assert ours.is_contiguous()
        assert_rounded_alike(ours, plain_rotation(x, cos, sin))


def test_rotate_slices_of_one_matrix() -> None:
    wide = normal(4, 8 * 16)
    query, key = wide[:, : 5 * 16].view(4, 5, 16), wide[:, 5 * 16 : 6 * 16].view(4, 1, 16)
    across = normal(5, 4, 16, seed=1).transpose(0, 1)
    cos, sin = normal(4, 16, seed=2), normal(1, 16, seed=3).expand(4, 16)
    for q in (query, across):
        ours = rotate(q, key, cos, sin)
        torch.testing.assert_close(ours[0], plain_rotation(q, cos, sin))
        torch.testing.assert_close(ours[1], plain_rotation(key, cos, sin))


def test_rotate_many_heads_takes_several_programs() -> None:
    query, key, cos, sin = (normal(2, *size, seed=len(size)) for size in [(37, 128), (19, 128), (128,), (128,)])
    ours = rotate(query, key, cos, sin)
    torch.testing.assert_close(ours[0], plain_rotation(query, cos, sin))
    torch.testing.assert_close(ours[1], plain_rotation(key, cos, sin))


def test_rotate_by_a_quarter_turn() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 9.0]]], device=DEVICE)
    zero, one = torch.zeros(1, 4, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    query, key = rotate(x, 2 * x, zero, one)
    assert query.tolist() == [[[-3.0, -4.0, 1.0, 2.0, 9.0]]] and key.tolist() == [[[-6.0, -8.0, 2.0, 4.0, 18.0]]]


@pytest.mark.parametrize("cos", [(2, 6), (3, 16), (2, 10)])
def test_rotate_refuses_what_does_not_fit(cos: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match="even R <= D"):
        rotate(normal(2, 3, 8), normal(2, 1, 8 if cos[1] != 6 else 4), normal(*cos), normal(*cos))
