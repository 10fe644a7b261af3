"""What goes in and out of MegatronBackend keeps every bit: Hugging Face files, its own checkpoints, in fp32 and bf16,
with experts over ranks. Files that are not the model's are refused.

One pair of ranks makes all observations; the tests below only compare.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.errors import ConfigurationError
from tests.integration.megatron_scenario import (
    PLAIN,
    SEQUENCES,
    Case,
    Layout,
    each_case,
    export_differences,
    leave_groups,
    make_backend,
)
from tests.integration.plain_reference import PlainTrainer
from tests.integration.rank_processes import run_ranks
from tests.integration.selection import selected
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import to_shards, toy_samples

SeenByRank = dict[Case, list[Any]]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

BACKEND = "miles_async.backends.megatron"
FILE = "model.safetensors"
ROUTER = "model.layers.1.mlp.gate.weight"
ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@dataclass(frozen=True)
class Model:
    family: str
    bf16: bool = False
    algorithm: AlgorithmArguments = PLAIN
    kept_in_fp32: tuple[str, ...] = ()  # more than dtypes.py says, by the ends of megatron's names


LAYOUTS = {
    "dp2": Layout(2),
    "ep2": Layout(2, expert=2),
    "tp2-ep2": Layout(2, tensor=2, expert=2, expert_tensor=1, model={"megatron_extra": ("--deterministic-mode",)}),
    "pp2": Layout(2, pipeline=2),
}
MODELS = {
    "qwen3-tied": Model("qwen3-tied"),
    "qwen3-moe": Model("qwen3-moe"),
    "qwen3-tied with a critic": Model("qwen3-tied", algorithm=AlgorithmArguments(token_advantages="gae")),
    "glm4-moe in bf16": Model("glm4-moe", bf16=True),
    "deepseek-v3 in bf16": Model("deepseek-v3", bf16=True),
    "gemma4 in bf16": Model("gemma4", bf16=True),
    "gemma4-moe in bf16": Model("gemma4-moe", bf16=True),
    "nemotron-h in bf16": Model("nemotron-h", bf16=True),
    "nemotron-h-moe in bf16": Model("nemotron-h-moe", bf16=True),
    "glm4-moe in bf16, router in fp32": Model("glm4-moe", bf16=True, kept_in_fp32=(".router.weight",)),
}
IN_TWO_DTYPES = "ep2", "glm4-moe in bf16, router in fp32"
CASES: list[Case] = [
    ("dp2", "qwen3-tied"),
    IN_TWO_DTYPES,
    ("tp2-ep2", "qwen3-moe"),
    ("tp2-ep2", "deepseek-v3 in bf16"),
    ("pp2", "glm4-moe in bf16"),
    ("pp2", "qwen3-tied with a critic"),
    ("pp2", "gemma4 in bf16"),
    ("ep2", "gemma4-moe in bf16"),
    ("pp2", "nemotron-h in bf16"),
    ("ep2", "nemotron-h-moe in bf16"),
]
# By day gemma4 and nemotron-h show their layers, other mixtures experts in bf16 and glm4-moe itself.
AT_NIGHT = {("pp2", "glm4-moe in bf16"), ("ep2", "gemma4-moe in bf16"), ("ep2", "nemotron-h-moe in bf16")}


@dataclass(frozen=True)
class Attempt:
    """To load ``family`` from files that differ, or into layers that differ."""

    refused: str = ""  # by an error that says this
    family: str = "qwen3-moe"
    layout: str = "dp2"
    without: str = ""  # a tensor of the files
    extra: tuple[str, ...] = ()  # tensors
    norm: str = ""  # what the norms of the host spec are replaced by


NO_PLACE, LACKS, UNKNOWN = (
    "tensors of the checkpoint that the model has no place for: ",
    "tensors of the model that the checkpoint lacks: ",
    "parameters of the model that megatron-bridge does not know: ",
)
EXPERT, BIAS = "model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
ATTEMPTS = {
    "a bias too many": Attempt(NO_PLACE + BIAS, extra=(BIAS,)),
    "an expert too many": Attempt(NO_PLACE + EXPERT.replace("7", "12"), extra=(EXPERT.replace("7", "12"),)),
    "no expert 7, on rank 1": Attempt(LACKS + EXPERT, layout="ep2", without=EXPERT),
    "no final norm, on rank 1": Attempt(LACKS + "model.norm.weight", layout="pp2", without="model.norm.weight"),
    "norms with a bias": Attempt(UNKNOWN + "decoder.final_layernorm.bias", layout="pp2", norm="with a bias"),
    "what transformers ignores": Attempt(
        family="qwen3-tied",
        extra=(
            "lm_head.weight",  # tied
            "model.layers.2.enorm.weight",  # multi-token prediction
            "model.layers.0.self_attn.rotary_emb.inv_freq",
        ),
    ),
    "norms built in bf16": Attempt(norm="in bf16"),
}


@dataclass(frozen=True)
class Observed:
    """On one rank. Differences are names of tensors."""

    differs_from_source: list[str]  # the export, before training
    differs_from_saved: list[str]  # the export, from what save_hf wrote
    differs_when_loaded: list[str]  # the export of another backend after load()
    differs_at_the_end: list[str]  # when both have trained on
    logprobs: list[list[float]]  # of what was saved
    steps: list[dict[str, float]]
    resumed: list[dict[str, float]]  # the last of these again
    same_draws: bool
    moved: set[str]  # by training


# ------------------------------------------------------------------------------------------- in the ranks
def _observe_all(rank: int, world_size: int, store: dist.Store, root: Path, cases: Sequence[Case]) -> dict[Case, Any]:
    from miles_async.backends.megatron.platform import Platform

    Platform.named("cpu").prepare(0)
    from miles_async.backends.megatron.model import dtypes

    def observe(store: dist.Store, case: Case) -> object:
        if case[0] == "attempt":
            return _attempt(store, rank, world_size, case[1], root)
        kept = (*dtypes.KEPT_IN_FP32, *MODELS[case[1]].kept_in_fp32)
        with patch(f"{BACKEND}.model.dtypes.KEPT_IN_FP32", kept):
            return _observe(store, rank, world_size, case, root)

    return each_case([*cases, *(("attempt", name) for name in ATTEMPTS)], store, observe)


def _attempt(store: dist.Store, rank: int, world_size: int, name: str, root: Path) -> list[str] | str:
    """Differences of the export, and of what save_hf() writes, from the files; or the refusal."""
    from miles_async.backends.megatron.norms import RMSNorm

    class WithBias(RMSNorm):
        def __init__(self, config: object, hidden_size: int, **kwargs: object) -> None:
            super().__init__(config, hidden_size, **kwargs)
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))

    class InBf16(RMSNorm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.to(torch.bfloat16)

    attempt, usual = ATTEMPTS[name], RMSNorm
    WithBias.__name__ = InBf16.__name__ = usual.__name__  # by which the bridge knows it
    norm = {"": usual, "with a bias": WithBias, "in bf16": InBf16}[attempt.norm]
    try:
        with patch(f"{BACKEND}.host.spec.RMSNorm", norm):
            backend = make_backend(rank, world_size, store, root / name, LAYOUTS[attempt.layout])
    except ConfigurationError as refusal:
        leave_groups()
        return str(refusal)
    differences = export_differences(backend, root / attempt.family)
    backend.save_hf(root / "saved" / name)
    source, saved = (load_file(directory / FILE) for directory in (root / name, root / "saved" / name))
    backend.close()
    kept = source.keys() - {"lm_head.weight"}  # of a tied model it is the embedding
    return differences + [name for name in kept if name not in saved or not torch.equal(saved[name], source[name])]


def _observe(store: dist.Store, rank: int, world_size: int, case: Case, root: Path) -> Observed:
    layout, model = LAYOUTS[case[0]], MODELS[case[1]]
    source, scratch = root / case[1], root / "-".join(case)
    backend = partial(
        make_backend,
        rank,
        world_size,
        layout=layout,
        algorithm=model.algorithm,
        bf16=model.bf16,
        lr_warmup_iters=3,
    )

    first = backend(dist.PrefixStore("first", store), source)
    part, parts = first.data_parallel_rank, first.data_parallel_size
    shards = [to_shards([toy_samples(8, seed=seed)], dp_size=parts, micro_batches=1)[part] for seed in range(4)]
    differs_from_source = export_differences(first, source)
    steps = [first.train(shard) for shard in shards[:2]]
    moved = set(export_differences(first, source))
    first.save(scratch / "checkpoint")
    first.save_hf(scratch / "saved")
    differs_from_saved, logprobs = export_differences(first, scratch / "saved"), first.logprobs(SEQUENCES)
    steps += [first.train(shard) for shard in shards[2:]]
    first.save_hf(scratch / "end")
    draws = torch.rand(3)
    first.close()

    # Other weights and another seed: what load() leaves shows.
    second = backend(dist.PrefixStore("second", store), root / "other" / case[1])
    torch.manual_seed(999)
    second.load(scratch / "checkpoint")
    differs_when_loaded = export_differences(second, scratch / "saved")
    resumed = [second.train(shard) for shard in shards[2:]]
    differs_at_the_end = export_differences(second, scratch / "end")
    same_draws = torch.equal(draws, torch.rand(3))
    second.close()
    return Observed(
        differs_from_source=differs_from_source,
        differs_from_saved=differs_from_saved,
        differs_when_loaded=differs_when_loaded,
        differs_at_the_end=differs_at_the_end,
        logprobs=logprobs,
        steps=steps,
        resumed=resumed,
        same_draws=same_draws,
        moved=moved,
    )


# -------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, model in MODELS.items():
        for seed, directory in enumerate((root / name, root / "other" / name)):
            save_tiny(model.family, directory, seed=seed, dtype="bfloat16" if model.bf16 else "float32")
            if model.kept_in_fp32:
                weights = load_file(directory / FILE)
                draw = torch.Generator().manual_seed(seed)
                weights[ROUTER] = torch.randn(weights[ROUTER].shape, generator=draw)
                save_file(weights, directory / FILE, metadata={"format": "pt"})
    for name, attempt in ATTEMPTS.items():
        shutil.copytree(root / attempt.family, root / name)
        weights = load_file(root / name / FILE)
        weights.pop(attempt.without, None)
        weights |= {extra: torch.zeros(1) for extra in attempt.extra}
        save_file(weights, root / name / FILE, metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def seen(root: Path, request: pytest.FixtureRequest) -> dict[Case, list[Observed | str]]:
    """Observations of each rank in each selected case, or a traceback."""
    cases = dict.fromkeys([*selected(request, "case"), IN_TWO_DTYPES])
    ranks = run_ranks(2, _observe_all, root, [*cases], timeout=300)
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=pytest.mark.long if case in AT_NIGHT else (), id="/".join(case)) for case in CASES
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def ranks(seen: SeenByRank, case: Case) -> list[Observed]:
    for rank in seen[case]:
        assert isinstance(rank, Observed), rank
    return seen[case]


def test_hugging_face_files_and_exports_hold_the_same_bits(ranks: list[Observed]) -> None:
    """Names, dtypes and values, on every rank: of what is loaded, and of what was trained and is saved."""
    for rank in ranks:
        assert rank.differs_from_source == []
        assert len(rank.moved) > 0
        assert rank.differs_from_saved == []


def test_training_resumed_from_a_checkpoint_equals_uninterrupted_training(ranks: list[Observed]) -> None:
    """Bit by bit, with --deterministic-mode and, on a CPU, without."""
    # covers: C9
    for rank in ranks:
        assert rank.differs_when_loaded == []
        for ours, expected in zip(rank.resumed, rank.steps[2:], strict=True):
            assert {**ours, "step_seconds": 0} == {**expected, "step_seconds": 0}  # exactly, not approximately
        assert rank.differs_at_the_end == []
        assert rank.same_draws


def test_bfloat16_training_is_close_to_float32(ranks: list[Observed], case: Case, root: Path) -> None:
    """Of plain PyTorch: the first step, and what transformers makes of the saved weights. In fp32 they are equal."""
    bf16 = MODELS[case[1]].bf16
    if MODELS[case[1]].algorithm != PLAIN:
        return  # it has other losses
    expected = PlainTrainer(root / case[1], lr=0.0).train([toy_samples(8, seed=0)])
    saved = PlainTrainer(root / "-".join(case) / "saved", lr=0.0)
    with torch.no_grad():
        logprobs = np.concatenate([saved.logprobs(sequence) for sequence in SEQUENCES if len(sequence) > 1])
    for rank in ranks:
        assert rank.steps[0]["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert rank.steps[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02 if bf16 else 1e-4)
        # On average, since a rounded router may choose another expert for a token.
        assert np.abs(np.concatenate(rank.logprobs) - logprobs).mean() < (0.02 if bf16 else 1e-6)


@pytest.mark.parametrize("name", [ROUTER, ROUTER_BIAS])
def test_what_stays_in_fp32_is_not_rounded(seen: SeenByRank, root: Path, name: str) -> None:
    """Router biases are not trained, other parameters in fp32 are."""
    # covers: M15
    case = IN_TWO_DTYPES
    source, saved = (load_file(directory / FILE)[name] for directory in (root / case[1], root / "-".join(case) / "end"))
    for tensor in (source, saved):
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.bfloat16().float())
    assert torch.equal(source, saved) is (name == ROUTER_BIAS)


# ----------------------------------------------------------------------- tensors without a counterpart
@pytest.mark.parametrize("attempt", [name for name, attempt in ATTEMPTS.items() if attempt.refused])
def test_files_that_are_not_the_model_s_are_refused_on_every_rank(seen: SeenByRank, attempt: str) -> None:
    for refusal in seen["attempt", attempt]:
        assert refusal.startswith("--hf-checkpoint")
        assert ATTEMPTS[attempt].refused in refusal


@pytest.mark.parametrize("attempt", [name for name, attempt in ATTEMPTS.items() if not attempt.refused])
def test_models_are_loaded_exactly_in_spite_of(seen: SeenByRank, attempt: str) -> None:
    for differences in seen["attempt", attempt]:
        assert differences == []
