from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from verl.common.errors import ConfigError
from verl.engines.mesh import Mesh, ParallelConfig, data_parallel_size


def test_data_parallel_is_what_is_left() -> None:
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert data_parallel_size(config, 16) == 4
    assert data_parallel_size(ParallelConfig(), 3) == 3


def test_sizes_that_do_not_divide_the_world_are_named() -> None:
    config = ParallelConfig(tensor_parallel_size=2, sequence_parallel_size=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 x sequence_parallel_size=3 takes 6 .* 8 ranks"):
        data_parallel_size(config, 8)
    with pytest.raises(ConfigError, match=r"lower pipeline_parallel_size"):
        Mesh.build(ParallelConfig(pipeline_parallel_size=2), "cpu")


def test_one_rank_has_size_1_and_rank_0_everywhere() -> None:
    mesh = Mesh.build(ParallelConfig(), "cpu")
    assert mesh == Mesh.single()
    assert {mesh.dp_size, mesh.pp_size, mesh.sp_size, mesh.tp_size, mesh.size("dp_sp")} == {1}
    assert {mesh.dp_rank, mesh.pp_rank, mesh.sp_rank, mesh.tp_rank} == {0}
    assert {mesh.dp_group, mesh.pp_group, mesh.sp_group, mesh.tp_group} == {None}


def test_places_of_four_ranks() -> None:
    """The last axis varies fastest: neighbours split matrices, far ranks hold other rows."""

    def places(rank: int) -> list[object]:
        found: list[object] = []
        for sizes in ({"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}, {"pipeline_parallel_size": 2}):
            mesh = Mesh.build(ParallelConfig(**sizes), "cpu")
            found.append((mesh.dp_rank, mesh.pp_rank, mesh.sp_rank, mesh.tp_rank))
            found.append(dist.get_process_group_ranks(mesh.group("dp_sp")))
        return found

    results = run_ranks(4, places)
    assert [r[0] for r in results] == [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1, 0, 0, 1)]
    assert [r[1] for r in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r[2] for r in results] == [(0, 0, 0, 0), (0, 0, 1, 0), (1, 0, 0, 0), (1, 0, 1, 0)]
    assert [r[3] for r in results] == [[0, 1, 2, 3]] * 4
    assert [r[4] for r in results] == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)]
