"""The critic on real ranks: its values, losses and gradients are those of plain PyTorch; what it is not trained for
does not move; checkpoints hold it.

# covers: C12
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.arguments.critic import CriticArguments
from miles_async.errors import CheckpointError
from tests.integration.megatron_scenario import LR, Layout, export_differences, make_backend, moving
from tests.integration.rank_processes import run_ranks
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import ToySample, to_shards, toy_samples

if TYPE_CHECKING:
    from miles_async.backends.megatron.backend import MegatronBackend

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GAMMA, LAMBD, CLIP, CRITIC_LR, UPDATES = 0.97, 0.9, 0.05, 3e-3, 2
PPO = AlgorithmArguments(token_advantages="gae", gamma=GAMMA, lambd=0.5, critic_lambd=LAMBD, use_rollout_logprobs=True)
CRITIC = CriticArguments(critic_lr=CRITIC_LR, value_clip=CLIP, num_critic_only_steps=1, critic_updates_per_step=UPDATES)
# The first rollout has one optimizer step, the others have two.
ROLLOUTS = [[toy_samples(8, seed=seed + 100 * step) for step in range(2 if seed else 1)] for seed in range(3)]


@dataclass
class Observed:
    """Of one rank."""

    steps: list[dict[str, float]] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)  # whether a rollout step changed the policy
    resumed: dict[str, dict[str, float]] = field(default_factory=dict)  # the last rollout step again, by way of saving
    without_critic: str = ""  # the error of a load from a checkpoint without one


def observe(rank: int, world_size: int, store: dist.Store, directory: Path, scratch: Path) -> Observed:
    def backend(name: str, algorithm: AlgorithmArguments = PPO) -> MegatronBackend:
        place = dist.PrefixStore(name, store)
        return make_backend(rank, world_size, place, directory, Layout(), algorithm, critic=CRITIC)

    observed = Observed()
    first = backend("first")
    shards = [to_shards(steps, dp_size=1, micro_batches=2)[0] for steps in ROLLOUTS]
    for number, shard in enumerate(shards):
        if number == 2:
            first.save(scratch / "saved")
            first.stage_save(scratch / "staged")
            first.offload()
            first.onload()
        with moving(first) as moved:
            observed.steps.append(first.train(shard))
        observed.moved.append(bool(moved))
    first.finish_save([first.write_save()])  # of what there was before the last rollout step
    first.close()

    for name in ("saved", "staged"):
        second = backend(name)
        second.train(shards[0])
        second.load(scratch / name)
        observed.resumed[name] = second.train(shards[2])
        second.close()

    without = backend("without", AlgorithmArguments())
    without.save(scratch / "without")
    without.load(scratch / "saved")  # the policy's part is whole by itself
    assert export_differences(without, directory) != []
    without.close()
    third = backend("third")
    try:
        third.load(scratch / "without")
    except CheckpointError as error:
        observed.without_critic = str(error)
    third.close()
    return observed


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3-tied", tmp_path_factory.mktemp("model") / "qwen3-tied")


@pytest.fixture(scope="module")
def seen(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    [observed] = run_ranks(1, observe, directory, tmp_path_factory.mktemp("checkpoints"), timeout=240)
    return observed


class PlainCritic:
    """A transformers model without its output layer, and a vector of zeros; one sample at a time, torch's AdamW."""

    def __init__(self, directory: Path) -> None:
        import transformers

        torch.set_num_threads(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        self.layers = model.model.train()
        self.head = torch.nn.Parameter(torch.zeros(model.config.hidden_size))
        self.parameters = [*self.layers.parameters(), self.head]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=CRITIC_LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def values(self, sample: ToySample) -> torch.Tensor:
        """Of the prefixes of the tokens that carry loss."""
        hidden = self.layers(torch.tensor([sample.tokens.tolist()])).last_hidden_state[0]
        return (hidden @ self.head)[np.flatnonzero(sample.loss_mask) - 1]

    def returns(self, sample: ToySample, values: Sequence[float]) -> list[float]:
        """λ-returns, backwards: R_t = r_t + γ ((1 - λ) V_{t+1} + λ R_{t+1})."""
        found = [sample.advantage]
        for later in reversed(values[1:]):
            found.append(GAMMA * ((1 - LAMBD) * later + LAMBD * found[-1]))
        return found[::-1]

    def train(self, steps: Sequence[Sequence[ToySample]]) -> dict[str, float]:
        samples = [sample for step in steps for sample in step]
        with torch.no_grad():
            old = {id(sample): self.values(sample) for sample in samples}
        targets = {id(sample): torch.tensor(self.returns(sample, old[id(sample)].tolist())) for sample in samples}
        losses, norms, count = 0.0, [], 0
        for step in [step for step in steps for _ in range(UPDATES)]:
            of_tokens = []
            for sample in step:
                now, before, target = self.values(sample), old[id(sample)], targets[id(sample)]
                bounded = torch.maximum(torch.minimum(now, before + CLIP), before - CLIP)
                of_tokens.append(torch.maximum((now - target) ** 2, (bounded - target) ** 2) / 2)
            loss = torch.cat(of_tokens)
            self.optimizer.zero_grad()
            loss.mean().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)))
            self.optimizer.step()
            losses, count = losses + float(loss.detach().sum()), count + len(loss)
        all_returns, all_values = (torch.cat([by[id(sample)] for sample in samples]) for by in (targets, old))
        return {
            "value_loss": losses / count,
            "critic_grad_norm": sum(norms) / len(norms),
            "value_mean": float(all_values.mean()),
            "return_mean": float(all_returns.mean()),
            "explained_variance": 1 - float((all_returns - all_values).var() / all_returns.var()),
        }


def test_values_loss_and_gradient_are_those_of_plain_pytorch(seen: Observed, directory: Path) -> None:
    plain = PlainCritic(directory)
    for found, rollout in zip(seen.steps, ROLLOUTS, strict=True):
        for name, expected in plain.train(rollout).items():
            assert found[name] == pytest.approx(expected, rel=2e-3, abs=1e-5), name
        assert found["critic_lr"] == CRITIC_LR
        assert found["lr"] == LR
    assert seen.steps[0]["value_mean"] == 0.0
    assert seen.steps[-1]["value_clip_fraction"] > 0


def test_the_critic_is_trained_alone_at_first(seen: Observed) -> None:
    assert seen.moved == [False, True, True]
    assert "loss" not in seen.steps[0]
    assert seen.steps[0]["skipped_optimizer_steps"] == len(ROLLOUTS[0])
    assert seen.steps[0]["loss_tokens"] == sum(int(sample.loss_mask.sum()) for step in ROLLOUTS[0] for sample in step)
    assert seen.steps[0]["critic_grad_norm"] > 0
    assert seen.steps[1]["skipped_optimizer_steps"] == 0


@pytest.mark.parametrize("way", ["saved", "staged"])
def test_training_resumed_from_a_checkpoint_equals_uninterrupted_training(seen: Observed, way: str) -> None:
    # covers: C9
    assert {**seen.resumed[way], "step_seconds": 0} == {**seen.steps[2], "step_seconds": 0}


def test_a_checkpoint_without_a_critic_is_refused(seen: Observed) -> None:
    assert "it belongs to a run without a critic; leave --token-advantages gae out" in seen.without_critic
