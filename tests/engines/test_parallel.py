from __future__ import annotations

import pytest
import torch

from tests.tiny import tiny_model
from verl.common.errors import ConfigError
from verl.engines.config import EngineConfig, TrainedConfig
from verl.engines.masters import Masters
from verl.engines.mesh import Mesh
from verl.engines.parallel import parallelize
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork

CPU = torch.device("cpu")


def test_one_rank_runs_the_network_as_it_is() -> None:
    network = PolicyNetwork(CausalLM(tiny_model("llama")))
    made = parallelize(network, TrainedConfig(), Mesh.single(), CPU, "actor", is_trained=True)
    assert made.network is network and made.passes.network is network and isinstance(made.weights, Masters)
    ((name, whole),) = made.full_tensors(["lm_head.weight"])
    assert name == "lm_head.weight" and whole.data_ptr() == network.module.get_parameter(name).data_ptr()
    assert parallelize(network, EngineConfig(), Mesh.single(), CPU, "reference", is_trained=False).weights is None


def test_parameters_of_one_rank_have_nowhere_to_go() -> None:
    network = PolicyNetwork(CausalLM(tiny_model("llama")))
    with pytest.raises(ConfigError, match=r"critic\.offload_parameters=true needs several ranks"):
        parallelize(network, TrainedConfig(offload_parameters=True), Mesh.single(), CPU, "critic", is_trained=True)
