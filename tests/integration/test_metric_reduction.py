"""Metrics over real ranks: sums, maxima and logs of sums that are beyond any float.

# covers: M3
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from tests.integration.rank_processes import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

NOTHING = -math.inf


def reduced(rank: int, world_size: int, store: dist.Store, pipeline: int) -> dict[str, list[float]]:
    from megatron.core import parallel_state

    from miles_async.backends.megatron.distributed import reduce_metrics

    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline)
    sums = {
        "loss": torch.tensor([1.0, 2.0][rank % 2]),
        "ratio_max": torch.tensor([5.0, 3.0][rank % 2]),
        "weights_log_sums": torch.tensor([[-5000.0, 900.0, NOTHING, NOTHING], [-5001.0, 0.0, 7.0, NOTHING]][rank % 2]),
    }
    last = parallel_state.is_pipeline_last_stage()
    found = reduce_metrics(sums if last else {}, torch.device("cpu"))
    dist.destroy_process_group()
    return {name: value.flatten().tolist() for name, value in found.items()}


@pytest.mark.parametrize("pipeline", [1, 2])
def test_every_rank_has_sums_maxima_and_logs_of_sums_over_the_replicas(pipeline: int) -> None:
    for found in run_ranks(2 * pipeline, reduced, pipeline):
        assert found["loss"] == [3.0]
        assert found["ratio_max"] == [5.0]
        assert found["weights_log_sums"] == pytest.approx(
            [-5000.0 + math.log1p(math.exp(-1.0)), 900.0, 7.0, NOTHING], rel=1e-12
        )
