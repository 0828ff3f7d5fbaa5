import torch

from verl.rollout.native.advance import Outputs
from verl.rollout.native.pending import Clock, Pending, to_device

CPU = torch.device("cpu")


def test_results_are_those_of_the_moment_of_launching() -> None:
    clock, out = Clock(CPU), Outputs.empty(2, 1, CPU)
    start = clock.now()
    out.tokens.fill_(5)
    pending = Pending("decode", [], out, clock, start)
    out.tokens.fill_(9)  # the next launch writes the same memory
    tokens, log_probs = pending.result()
    assert tokens.tolist() == [[5], [5]] and log_probs.tolist() == [[0.0], [0.0]] and pending.steps == 2
    assert pending.seconds > 0


def test_what_is_on_the_host_already_is_not_copied() -> None:
    values = torch.arange(3)
    assert to_device(values, CPU) is values
