import pickle
from pathlib import Path

import pytest
import torch

from tests.algorithms.rows import NAN, near
from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Loss, clean, take
from verl.common.errors import ConfigError, MissingField, ShapeError, UnknownName

MASK = torch.tensor([[True, False]])


def test_every_entry_loads_by_its_own_name():
    for name in ALGORITHMS:
        algorithm = ALGORITHMS.load(name)
        config = algorithm.Config()
        assert config.name == name and algorithm(config).family in ("on_policy", "preference", "supervised")
        assert config.ineffective_keys() == []
        assert "Source:" in algorithm.__doc__


def test_every_entry_has_its_page_and_every_key_is_on_it():
    docs = Path(__file__).parents[2] / "docs" / "algorithms"
    overview = (docs / "README.md").read_text()
    for name in ALGORITHMS:
        page = (docs / f"{name}.md").read_text()
        assert f"({name}.md)" in overview
        for key, field in ALGORITHMS.load(name).Config.model_fields.items():
            assert field.description, f"{name}.{key} has no docstring"
            assert key in page + overview, f"{name}.{key} isn't documented"


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'grpo'"):
        ALGORITHMS.load("gpro")


def test_what_each_algorithm_needs_and_trains():
    def of(name, **keys):
        algorithm = ALGORITHMS.load(name)
        return algorithm(algorithm.Config(**keys))

    assert of("ppo").needs == {"critic"} and of("ppo").trains == ("critic", "actor")
    assert of("ppo", kl_coef=0.1).needs == {"critic", "reference", "old_log_probs"}
    assert of("ppo", kl_coef=0.1, kl_in="loss").needs == {"critic", "reference"}
    assert of("grpo").needs == frozenset() and of("grpo").trains == ("actor",)
    assert of("grpo", kl_coef=0.1).needs == {"reference"}
    assert of("grpo").min_group_size == 2 and of("ppo").min_group_size == 1
    for name in ("dr_grpo", "gspo", "cispo", "opo", "reinforce_pp_baseline"):
        assert of(name).needs == frozenset() and of(name).trains == ("actor",) and of(name).min_group_size == 2
        assert of(name, kl_coef=0.1).needs == {"reference"}


def test_an_algorithm_crosses_processes():
    ppo = ALGORITHMS.load("ppo")
    algorithm = ppo(ppo.Config(kl_coef=0.1, kl_target=0.02))
    assert pickle.loads(pickle.dumps(algorithm)).state_dict() == {"kl_coef": 0.1}


def test_no_critic_to_train():
    grpo = ALGORITHMS.load("grpo")
    with pytest.raises(ConfigError, match="'grpo' has no critic"):
        grpo(grpo.Config()).critic_loss(torch.zeros(1, 1), {})


def test_columns_are_read_inside_the_mask_only():
    near(take({"values": torch.tensor([[1.0, NAN]])}, "values", MASK), [[1.0, 0.0]])
    x = torch.tensor([[1.0, NAN]], requires_grad=True)
    (gradient,) = torch.autograd.grad(clean(x, MASK, "x").exp().sum(), x)
    near(gradient, [[2.7182818, 0.0]])
    assert clean(torch.zeros(1, 2, dtype=torch.bfloat16), MASK, "x").dtype == torch.float32


def test_missing_and_misshapen_columns_are_named():
    with pytest.raises(MissingField, match=r"'ref_log_probs'.*reference"):
        take({}, "ref_log_probs", MASK)
    with pytest.raises(ShapeError, match=r"values is \[1, 3\]"):
        take({"values": torch.zeros(1, 3)}, "values", MASK)


def test_a_total_of_nothing_divides_by_one():
    near(Loss.divisor(torch.tensor(0.0)), 1.0)
    near(Loss.divisor(torch.tensor(5.0)), 5.0)
