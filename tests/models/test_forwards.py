from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from verl.models.forwards import forward_of, put


def twice(x: Tensor) -> Tensor:
    return 2 * x


def test_a_forward_stands_in_for_a_while_and_hooks_go_on() -> None:
    part, x = nn.Identity(), torch.ones(2)
    part.register_forward_hook(lambda layer, inputs, out: out + 1)
    with put([forward_of(part, twice)]):
        assert part(x).tolist() == [3.0, 3.0]
        with put([forward_of(part, torch.zeros_like)]):
            assert part(x).tolist() == [1.0, 1.0]
        assert part(x).tolist() == [3.0, 3.0]
    assert part(x).tolist() == [2.0, 2.0] and "forward" not in vars(part)


def test_what_stood_there_is_put_back_after_an_error() -> None:
    namespace = {"kept": 1}
    with pytest.raises(ValueError, match="inside"), put([(namespace, "kept", 2), (namespace, "new", 3)]):
        assert namespace == {"kept": 2, "new": 3}
        raise ValueError("inside")
    assert namespace == {"kept": 1}
