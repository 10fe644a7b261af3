"""One MegatronBackend on one rank: exports, schedules, and batches and directories that are odd or wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.errors import CheckpointError, ConfigurationError, ContractViolation
from miles_async.train_data.batch import token_advantages
from miles_async.types import TrainBatch, TrainShard
from miles_async.weights.staging import Staging, StagingOptions
from tests.benchmarks.staging import AnonymousMemory
from tests.integration.megatron_scenario import SEQUENCES, Layout, make_backend, moving
from tests.integration.plain_reference import PlainTrainer
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny_qwen3
from tests.integration.toy_batches import ToySample, to_batch, to_shards, toy_samples

Seen = dict[str, Any]  # what a rank saw, by name

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

BUCKET = 16 * 2**20
ONE_RANK = Layout()
SETTINGS = (
    *("--tp-comm-overlap-rs", "false", "--fp16-lm-cross-entropy", "--moe-permute-fusion"),
    *("--gradient-reduce-div-fusion", "false", "--decoupled-lr", "1e-4", "--use-precision-aware-optimizer"),
)
TOKENIZER = {"tokenizer.json": '{"made": "for this test"}', "tokenizer_config.json": "{}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_qwen3(tmp_path_factory.mktemp("model") / "qwen3", tied=True)
    for name, text in TOKENIZER.items():
        (directory / name).write_text(text)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))  # not what it is trained in
    return directory


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Observations of a single rank."""
    large = tmp_path_factory.mktemp("model") / "large"
    save_tiny_qwen3(large, tied=False, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, head_dim=64)
    return run_ranks(1, _single_rank, model, large, tmp_path_factory.mktemp("single"))[0]


# ------------------------------------------------------------------------------------------- in the ranks
def _single_rank(rank: int, world_size: int, store: dist.Store, model: Path, large: Path, scratch: Path) -> Seen:
    from megatron.core.utils import get_model_config

    from miles_async.backends.megatron.packing.pack import pack_batch

    def backend(name: str, directory: Path = model, layout: Layout = ONE_RANK, **settings: Any) -> Any:
        return make_backend(rank, world_size, dist.PrefixStore(name, store), directory, layout, **settings)

    seen: Seen = {}
    exporting = backend("large", large)
    with AnonymousMemory() as memory:
        staging = Staging(StagingOptions(parent=scratch, bucket_bytes=BUCKET))
        staging.copy(0, exporting.export_weights())
        staged = staging.stage(0)
    seen["staged"] = len(staged.buckets), staged.total_bytes, memory.above
    exporting.close()

    samples = toy_samples(8)
    [shard] = to_shards([samples], dp_size=1, micro_batches=2)

    trained = backend("schedule", lr=1e-3, min_lr=1e-4, lr_warmup_iters=4, lr_decay_style="linear")
    seen["lr"] = [trained.train(shard)["lr"] for _ in range(11)]

    seen["at temperature 2"] = trained.logprobs(SEQUENCES, temperature=2.0)
    seen["one at a time"] = [trained.logprobs([sequence], temperature=2.0)[0] for sequence in SEQUENCES]

    trained.save_hf(scratch / "export")
    seen["exported"] = scratch / "export"
    seen["logprobs"] = trained.logprobs(SEQUENCES)

    masked = [dataclasses.replace(sample, loss_mask=sample.loss_mask * 0) for sample in samples]
    with moving(trained) as seen["moved by no loss"]:
        seen["no loss tokens"] = trained.train(to_shards([masked], dp_size=1, micro_batches=1)[0])

    trained.close()
    trained = backend("decaying", lr=1e-3, weight_decay=0.1, lr_warmup_iters=4)
    trained.train(shard)
    equal = [dataclasses.replace(sample, advantage=0.0) for sample in samples]
    with moving(trained) as seen["moved between"]:
        seen["no advantages"] = trained.train(to_shards([equal, samples, equal], dp_size=1, micro_batches=2)[0])
    with moving(trained) as seen["moved by no advantages"]:
        seen["only no advantages"] = trained.train(to_shards([equal], dp_size=1, micro_batches=2)[0])

    seen["empty micro-batch"] = trained.train(to_shards([samples[:1]], dp_size=1, micro_batches=3)[0])

    wrong = msgspec.structs.replace(shard, loss_tokens=(shard.loss_tokens[0] + 1,))
    seen["wrong token count"] = _error(lambda: trained.train(wrong))
    infinite = [dataclasses.replace(sample, advantage=float("inf")) for sample in samples]
    with moving(trained) as seen["moved by infinity"]:
        seen["infinite"] = trained.train(to_shards([infinite], dp_size=1, micro_batches=1)[0])

    trained.close()
    trained = backend("still", lr=0.0)
    token = ToySample(
        tokens=np.zeros(1, np.int32),
        loss_mask=np.zeros(1, np.uint8),
        rollout_logprobs=np.zeros(1, np.float32),
        weight_versions=np.full(1, -1, np.int32),
        advantage=0.0,
    )
    filled = msgspec.structs.replace(shard, optimizer_steps=((*shard.optimizer_steps[0], to_batch([token])),))
    seen["without filler"], seen["with filler"] = trained.train(shard), trained.train(filled)
    seen["advantage per token"] = trained.train(_with_advantages(shard, token_advantages))
    seen["twice the advantage per token"] = trained.train(_with_advantages(shard, lambda b: 2 * token_advantages(b)))

    trained.close()
    own = AlgorithmArguments(
        advantage_estimator="reinforce",
        token_advantages=f"{__name__}:EntropyAdvantages",
        policy_loss=f"{__name__}:EntropySurvey",
    )
    trained = backend("entropy", algorithm=own)
    seen["entropy before any step"] = trained.train(shard)

    seen["capped logits"] = _error(_with_output_layer_of_its_own)
    trained.close()
    trained = backend("settings", layout=Layout(model={"megatron_extra": SETTINGS, "share_prefixes": True}))
    model_config, (module,) = get_model_config(trained._model.modules[0]), trained._model.modules
    optimizer = trained._runner.policy.optimizer.config
    seen["settings"] = {
        "tp_comm_overlap_rs": model_config.tp_comm_overlap_rs,
        "fp16_lm_cross_entropy": model_config.fp16_lm_cross_entropy,
        "moe_permute_fusion": model_config.moe_permute_fusion,
        "gradient_reduce_div_fusion": module.ddp_config.gradient_reduce_div_fusion,
        "decoupled_lr": optimizer.decoupled_lr,
        "use_precision_aware_optimizer": optimizer.use_precision_aware_optimizer,
    }

    shared = pack_batch(to_batch(samples), 0, trained._model.pack_layout, trained.device)
    seen["shared prefixes"] = shared.num_tokens, shared.tokens.numel()
    seen["other positions"] = _error(_with_a_rotary_embedding_of_its_own)

    (scratch / "occupied").mkdir()
    (scratch / "occupied" / "file").touch()
    seen["save to occupied"] = _error(lambda: trained.save(scratch / "occupied"))
    seen["load absent"] = _error(lambda: trained.load(scratch / "absent"))
    seen["load other"] = _error(lambda: trained.load(scratch / "occupied"))
    trained.close()
    return seen


class EntropyAdvantages:
    """The advantage of a token is its entropy."""

    needs = ("entropy",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        pass

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        return batch.entropy


class EntropySurvey(EntropyAdvantages):
    """A loss that surveys the batch's entropies, and shows them and the advantages."""

    needs = ("entropy", "surveyed")

    def survey(self, batches: Sequence[TokenBatch], gather: object) -> list[torch.Tensor]:
        return [batch.entropy for batch in batches]

    def __call__(self, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # type: ignore[override]
        return -batch.advantages * logprobs, {"surveyed": batch.surveyed, "advantage": batch.advantages}


def _with_output_layer_of_its_own() -> None:
    """A model whose logits are more than a product, as Gemma 2's."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from miles_async.backends.megatron.model.output import return_hidden_states

    capped = type("CappedLinear", (ColumnParallelLinear,), {"forward": lambda self, hidden, **_: hidden.tanh()})
    layer = capped.__new__(capped)
    torch.nn.Module.__init__(layer)
    layer.bias = None
    return_hidden_states(SimpleNamespace(output_layer=layer))  # type: ignore[arg-type]


def _with_a_rotary_embedding_of_its_own() -> None:
    """A model whose positions are more than angles that its layers are given, as with latent attention."""
    from miles_async.backends.megatron.packing.shared_prefixes import check_module

    module = torch.nn.Module()
    module.config = SimpleNamespace(multi_latent_attention=False)  # type: ignore[assignment]
    module.rotary_pos_emb = type("TwoRotaryEmbeddings", (torch.nn.Module,), {})()
    check_module(module)


def _with_advantages(shard: TrainShard, advantages: Callable[[TrainBatch], np.ndarray]) -> TrainShard:
    steps = tuple(
        tuple(msgspec.structs.replace(batch, advantages=advantages(batch)) for batch in step)
        for step in shard.optimizer_steps
    )
    return msgspec.structs.replace(shard, optimizer_steps=steps)


def _error(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


# -------------------------------------------------------------------------------------------------- tests
def test_learning_rate_warms_up_from_the_first_step_and_decays_to_the_minimum(seen: Seen) -> None:
    warm_up = [0.25e-3, 0.5e-3, 0.75e-3, 1e-3]
    decay = [1e-3 - 0.9e-3 * step / 6 for step in range(1, 7)]
    assert seen["lr"] == pytest.approx([*warm_up, *decay, 1e-4])


def test_settings_of_megatron_reach_its_configs(seen: Seen) -> None:
    assert seen["settings"] == {
        "tp_comm_overlap_rs": False,
        "fp16_lm_cross_entropy": True,
        "gradient_reduce_div_fusion": False,
        "decoupled_lr": 1e-4,
        "moe_permute_fusion": False,  # what a CPU has not, whatever is asked for
        "use_precision_aware_optimizer": False,
    }


def test_logprobs_at_another_temperature(seen: Seen) -> None:
    """The canary is scored at temperature 1, as engines score prompts, whatever rollouts are sampled at."""
    np.testing.assert_allclose(
        np.concatenate(seen["at temperature 2"]), np.concatenate(seen["one at a time"]), atol=1e-6
    )
    assert np.concatenate(seen["at temperature 2"]).std() < np.concatenate(seen["logprobs"]).std()


def test_hf_export_holds_the_trained_weights_and_the_source_s_own_files(seen: Seen, model: Path) -> None:
    exported: Path = seen["exported"]
    plain = PlainTrainer(exported, lr=0.0)
    with torch.no_grad():
        logprobs = [plain.logprobs(sequence).tolist() for sequence in SEQUENCES if len(sequence) > 1]
    ours = [row for row in seen["logprobs"] if row]
    np.testing.assert_allclose(np.concatenate(logprobs), np.concatenate(ours), atol=1e-5)
    for name, text in TOKENIZER.items():
        assert (exported / name).read_text() == text
    configs = [json.loads((directory / "config.json").read_text()) for directory in (model, exported)]
    assert configs[1] == configs[0] | {"dtype": "float32"}
    assert {file.stat().st_mode & 0o777 for file in exported.glob("*.safetensors")} == {0o644}  # others may read it


def test_export_and_staging_take_the_host_memory_of_one_copy(seen: Seen) -> None:
    """Beside the model, measured."""
    buckets, total_bytes, memory = seen["staged"]
    assert buckets > 3
    assert total_bytes * 0.9 < memory <= total_bytes + 1.25 * BUCKET  # and what a tensor is gathered into


def test_a_step_without_loss_tokens_leaves_the_weights_alone(seen: Seen) -> None:  # covers: R10
    assert seen["no loss tokens"]["skipped_optimizer_steps"] == 1
    assert seen["no loss tokens"]["loss_tokens"] == 0
    assert seen["moved by no loss"] == []


def test_a_step_whose_advantages_are_all_zero_is_not_made(seen: Seen) -> None:  # covers: R10
    """Nor by momentum, nor by weight decay; the learning rate counts it, and its tokens are in the metrics."""
    assert seen["moved by no advantages"] == []
    assert seen["only no advantages"]["skipped_optimizer_steps"] == 1
    assert seen["only no advantages"]["grad_norm"] == 0
    assert seen["only no advantages"]["loss_tokens"] == seen["no advantages"]["loss_tokens"] / 3 > 0
    # Among other steps it is only left out.
    assert seen["moved between"]
    assert seen["no advantages"]["optimizer_steps"] == 3
    assert seen["no advantages"]["skipped_optimizer_steps"] == 2
    assert seen["no advantages"]["grad_norm"] > 0
    assert seen["no advantages"]["lr"] == pytest.approx(1e-3)  # the fourth step of a warm-up of four


def test_empty_micro_batches_are_allowed(seen: Seen) -> None:
    """Ranks have equally many micro-batches even if there are not that many samples."""
    assert np.isfinite(seen["empty micro-batch"]["grad_norm"])
    assert seen["empty micro-batch"]["skipped_optimizer_steps"] == 0


def test_a_micro_batch_of_one_token_without_loss_changes_nothing(seen: Seen) -> None:
    """The filler of ``train_data.batch_maker``, where a rank has fewer sequences than others have micro-batches."""
    for name in ("loss", "grad_norm", "loss_tokens"):
        assert seen["with filler"][name] == pytest.approx(seen["without filler"][name], rel=1e-6)
    assert seen["with filler"]["tokens"] == seen["without filler"]["tokens"] + 1


def test_an_advantage_per_token_is_what_one_per_sequence_stands_for(seen: Seen) -> None:
    for name in ("loss", "grad_norm", "loss_tokens"):
        assert seen["advantage per token"][name] == seen["without filler"][name]
    assert seen["twice the advantage per token"]["loss"] == pytest.approx(2 * seen["without filler"]["loss"])


def test_entropies_are_known_before_the_first_optimizer_step(seen: Seen) -> None:
    """For your own --token-advantages, and a loss that surveys the batch."""
    metrics = seen["entropy before any step"]
    assert metrics["advantage"] == pytest.approx(metrics["entropy"], rel=1e-5)
    assert metrics["surveyed"] == pytest.approx(metrics["entropy"], rel=1e-5)


def test_a_model_whose_logits_are_more_than_a_product_is_refused(seen: Seen) -> None:
    """Log-probs are computed from hidden states and the output layer's weight: they would be wrong silently."""
    assert isinstance(seen["capped logits"], ConfigurationError)
    assert "CappedLinear" in str(seen["capped logits"])


def test_what_samples_begin_with_is_in_the_model_once(seen: Seen) -> None:
    """That gradients stay the same is shown by test_megatron_layouts.py."""
    samples = [sample.tokens.tolist() for sample in toy_samples(8)]
    prefixes = {tuple(sample[:end]) for sample in samples for end in range(1, len(sample))}
    tokens = sum(map(len, samples))
    assert len(prefixes) < tokens - len(samples)
    assert seen["shared prefixes"] == (tokens, len(prefixes))


def test_sharing_prefixes_with_positions_that_cannot_be_given_is_refused(seen: Seen) -> None:
    assert isinstance(seen["other positions"], ConfigurationError)
    assert "--share-prefixes: expected a model with a plain rotary embedding, found TwoRot" in str(
        seen["other positions"]
    )


def test_shards_that_do_not_belong_together_stop_the_run(seen: Seen) -> None:
    assert isinstance(seen["wrong token count"], ContractViolation)
    assert "loss tokens" in str(seen["wrong token count"])


def test_a_step_whose_gradient_is_not_finite_is_never_made(seen: Seen) -> None:
    """Whatever the limits; what becomes of the run is shown by tests/unit/test_controller.py."""
    assert seen["infinite"]["bad_steps/grad_norm"] == seen["infinite"]["skipped_optimizer_steps"] == 1
    assert not np.isfinite(seen["infinite"]["bad_grad_norm"])
    assert seen["infinite"]["grad_norm"] == 0
    assert seen["moved by infinity"] == []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("save to occupied", "not empty"),
        ("load absent", "does not exist"),
        ("load other", "holds no trainer checkpoint"),
    ],
)
def test_checkpoint_directories_that_cannot_be_used(seen: Seen, what: str, message: str) -> None:
    assert isinstance(seen[what], CheckpointError)
    assert message in str(seen[what])
