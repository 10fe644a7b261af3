"""What the trainer exports of every family is what SGLang's loader of that family holds, element by element: no tensor
more or less, and no parameter that a publication leaves as it was. A real server for each, and Megatron.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from miles_async.engines.kind import ServerSpec
from tests.integration.family_table import SERVED, SERVED_AT_NIGHT
from tests.integration.publishing import Trainer, one_engine, publishing
from tests.integration.served_models import save_served

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

CASES = [*SERVED, *(pytest.param(*case, marks=pytest.mark.long) for case in SERVED_AT_NIGHT)]
# Gemma: two norms of each of two layers, and the last one. Nemotron-H: decays of each layer of Mamba-2.
IN_OTHER_FORM = {"gemma": 5, "nemotron-h": 2, "nemotron-h-moe": 1}


@pytest.mark.parametrize(("family", "ranks"), CASES)
async def test_engines_hold_all_that_is_exported_and_nothing_else(
    family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_imports: Path
) -> None:
    # covers: C8, M16
    if ranks > 1:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang asks for that on one NUMA node
    model = save_served(family, tmp_path / "model", seed=0)
    spec = ServerSpec(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        tensor_parallel_size=ranks,
        start_timeout=200,
        log_dir=str(tmp_path / "logs"),
        held_weights=True,
        dummy_weights=True,
        fork_server=engine_imports,
    )
    async with one_engine(spec) as engine:
        with closing(Trainer(model)) as trainer:
            async with publishing(trainer, engine.fleet, tmp_path / "staged", tolerance=1e-4) as published:
                for _ in range(2):
                    publication = await published.next()
                    assert publication.engines == ("engine-0",)
                    assert publication.incomparable_tensors == IN_OTHER_FORM.get(family, 0)
                    assert publication.compared_tensors == len(trainer.weights()) - publication.incomparable_tensors
