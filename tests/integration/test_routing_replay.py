"""Replayed experts: the trainer against a float64 model that is given the same experts, in every layout of ranks.

# covers: M19
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.integration.megatron_scenario import Case, Layout
from tests.integration.rank_processes import run_ranks
from tests.integration.routing_scenario import Mixture, Replayed, observe_old_policy, observe_replays
from tests.integration.tiny_models import save_tiny
from tests.integration.toy_batches import ToySample, toy_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SCALE = 1.0  # of optimizer steps, at which routers change their minds
RECOMPUTED = {"recompute_granularity": "full"}
LAYOUTS = {
    "one-rank": Layout(micro_batches=3),
    # Prompts are shared only where routers choose: engines may have read a prompt with different experts.
    "one-rank-recompute-shared-prefixes": Layout(model={**RECOMPUTED, "share_prefixes": True}),
    "one-rank-adapters": Layout(micro_batches=3, model={"lora_rank": 2, "lora_alpha": 6.0}),
    "one-rank-recompute-moe": Layout(
        micro_batches=2, model={"recompute_granularity": "selective", "recompute_modules": ("moe",)}
    ),
    "ep2": Layout(world_size=2, expert=2, micro_batches=2),
    "pp2-recompute": Layout(world_size=2, pipeline=2, micro_batches=3, model=RECOMPUTED),
    "pp2-virtual2-recompute": Layout(world_size=2, pipeline=2, virtual=2, micro_batches=3, model=RECOMPUTED),
    "cp2": Layout(world_size=2, context=2, micro_batches=2),
    "tp2-sequence-parallel": Layout(world_size=2, tensor=2, micro_batches=2),
    "tp2-cp2-ep2": Layout(world_size=4, tensor=2, context=2, expert=2, expert_tensor=1, micro_batches=2),
}
ALWAYS: list[Case] = [
    ("one-rank-recompute-shared-prefixes", "qwen3-moe"),
    ("one-rank-adapters", "qwen3-moe"),
    ("pp2-virtual2-recompute", "four-layers"),
    ("tp2-cp2-ep2", "qwen3-moe"),
]
CASES: list[Case] = [
    *((name, "four-layers" if "virtual" in name else "qwen3-moe") for name in LAYOUTS),
    *((name, family) for name in ("ep2", "pp2-recompute") for family in ("gemma4-moe", "nemotron-h-moe")),
]


def each(cases: Iterable[Case]) -> pytest.MarkDecorator:
    marks = {case: [] if case in ALWAYS else [pytest.mark.long] for case in cases}
    return pytest.mark.parametrize("case", [pytest.param(case, id="-".join(case), marks=marks[case]) for case in marks])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mixture]:
    root = tmp_path_factory.mktemp("models")
    deeper = save_tiny("qwen3-moe", root / "four-layers", num_hidden_layers=4)
    return {
        "four-layers": Mixture(deeper, layers=4, topk=2, experts=12),
        **{
            family: Mixture(save_tiny(family, root / family), layers=layers, topk=2, experts=12)
            for family, layers in (("qwen3-moe", 2), ("gemma4-moe", 2), ("nemotron-h-moe", 4))
        },
    }


@pytest.fixture(scope="module")
def seen(models: dict[str, Mixture]) -> Callable[[Case], list[Replayed]]:
    """Observations of each rank in a case."""

    @functools.cache
    def of_case(case: Case) -> list[Replayed]:
        found = run_ranks(LAYOUTS[case[0]].world_size, observe_replays, models, LAYOUTS, [case], timeout=300)
        failed = [rank[case] for rank in found if isinstance(rank[case], str)]
        assert not failed, failed[0]
        return [rank[case] for rank in found]

    return of_case


class Reference:
    """transformers in float64, whose routers are told what to choose: log-probs, loss and gradients."""

    def __init__(self, mixture: Mixture) -> None:
        from transformers import AutoModelForCausalLM

        self.mixture = mixture
        self.model = AutoModelForCausalLM.from_pretrained(
            mixture.directory, dtype=torch.float64, experts_implementation="eager"
        )
        self.given: torch.Tensor | None = None  # [T, layers, top-k]; None: routers choose
        self.chosen: dict[int, torch.Tensor] = {}  # layer → [T, top-k], of the last pass
        for number, layer in enumerate(self.model.model.layers):
            if (router := router_of(layer)) is not None:
                router.forward = functools.partial(self._choose, router, number)

    def _choose(self, router: Any, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, scale = hidden.reshape(-1, hidden.shape[-1]), torch.ones((), dtype=torch.float64)
        if hasattr(router, "per_expert_scale"):  # Gemma 4
            scores = router.proj(router.norm(hidden) * router.scale * router.scalar_root_size).softmax(-1)
            ranked, scale = scores, router.per_expert_scale
        elif hasattr(router, "e_score_correction_bias"):  # Nemotron-H
            scores = (hidden @ router.weight.T).sigmoid()
            ranked, scale = scores + router.e_score_correction_bias, scale * router.routed_scaling_factor
        else:
            ranked = scores = (hidden @ router.weight.T).softmax(-1)
        chosen = ranked.topk(self.mixture.topk, -1).indices if self.given is None else self.given[:, layer]
        self.chosen[layer] = chosen
        weights = scores.gather(1, chosen)
        return scores, weights / weights.sum(-1, keepdim=True) * scale.expand(scores.shape[1])[chosen], chosen

    def give(self, sample: ToySample) -> None:
        """The experts of a sample. Those of its last token are no matter, so it gets others than anybody else's."""
        experts = self.mixture.choices(sample).astype(np.int64)
        experts[-1] = np.tile([3, 8], self.mixture.layers)
        self.given = torch.from_numpy(experts).reshape(-1, self.mixture.layers, self.mixture.topk)

    def logprobs(self, sample: ToySample) -> torch.Tensor:
        """Of tokens[1:]."""
        row = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        logits = self.model(row).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None])[:, 0]

    def gradients(self, samples: list[ToySample]) -> dict[str, np.ndarray]:
        """Of the mean over loss tokens of - advantage × ratio, at ratio 1."""
        total = sum(int(sample.loss_mask.sum()) for sample in samples)
        for sample in samples:
            self.give(sample)
            mask = torch.from_numpy(sample.loss_mask[1:]).double()
            (-(sample.advantage * self.logprobs(sample) * mask).sum() / total).backward()
        for parameter in self.model.parameters():
            parameter.data = parameter.grad
        return self.saved()

    def saved(self) -> dict[str, np.ndarray]:
        """What is trained, by the names of checkpoints."""
        with TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            saved = load_file(Path(folder) / "model.safetensors")
        constants = tuple(name.rpartition(".")[2] for name, _ in self.model.named_buffers())
        return {name: tensor for name, tensor in saved.items() if not name.endswith(constants)}


def router_of(layer: Any) -> Any:
    """The router of a layer of transformers' models; None if it has none."""
    for path in ("mlp.gate", "router", "mixer.gate"):
        with suppress(AttributeError):
            return layer.get_submodule(path)
    return None


@pytest.fixture(scope="module")
def reference(models: dict[str, Mixture]) -> Callable[[str], tuple[dict[bytes, np.ndarray], dict[str, np.ndarray]]]:
    """(log-probs by the tokens of a sample, gradients)"""

    @functools.cache
    def of_model(name: str) -> tuple[dict[bytes, np.ndarray], dict[str, np.ndarray]]:
        plain, samples = Reference(models[name]), toy_samples(12)
        logprobs = {}
        for sample in samples:
            plain.give(sample)
            with torch.no_grad():
                logprobs[sample.tokens.tobytes()] = plain.logprobs(sample).numpy()
        return logprobs, plain.gradients(samples)

    return of_model


@each(CASES)
def test_log_probs_are_those_of_the_given_experts(case: Case, seen: Any, reference: Any) -> None:
    expected, _ = reference(case[1])
    samples = {sample.tokens.tobytes(): sample for sample in toy_samples(12)}
    found: set[bytes] = set()
    for rank in seen(case):
        for tokens, logprobs in rank.logprobs:
            position = 0
            flat = np.array(tokens, np.int32)
            while position < len(flat):
                key = next(k for k, s in samples.items() if flat[position:].tobytes().startswith(k))
                mask = samples[key].loss_mask[1:] == 1
                mine = np.array(logprobs[position + 1 : position + len(samples[key].tokens)])
                np.testing.assert_allclose(mine[mask], expected[key][mask], atol=2e-5)
                position += len(samples[key].tokens)
                found.add(key)
    assert found == samples.keys()


@each(case for case in CASES if "adapters" not in case[0])
def test_gradients_are_those_of_the_given_experts(case: Case, seen: Any, reference: Any) -> None:
    """Of routers, too: through the weights of the experts that were given."""
    _, expected = reference(case[1])
    found = seen(case)[0].gradients
    assert {name for name, gradient in found.items() if gradient.any()} == expected.keys()
    assert any(name.endswith(("gate.weight", "router.proj.weight")) for name in expected)
    for name, gradient in expected.items():
        scale = np.abs(gradient).max()
        assert scale > 1e-5, name
        atol = max(1e-3 * scale, 5e-7)  # found is a difference of weights up to 7
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=atol, err_msg=name)


@each([("one-rank-adapters", "qwen3-moe")])
def test_adapters_get_the_gradients_of_the_given_experts(case: Case, seen: Any, reference: Any) -> None:
    """At first B is 0, so that A has no gradient, and that of B is α/r · (the weight's) · Aᵀ."""
    _, expected = reference(case[1])
    adapter = seen(case)[0].adapter
    names = {name.partition(".lora_")[0] for name in adapter}
    assert any(".experts.11." in name for name in names)
    for name in names:
        first, moved = adapter[f"{name}.lora_A.weight"], adapter[f"{name}.lora_B.weight"]
        gradient = 6.0 / 2 * expected[f"{name.removeprefix('base_model.model.')}.weight"] @ first.T
        np.testing.assert_allclose(-moved, gradient, rtol=0, atol=1e-3 * np.abs(gradient).max(), err_msg=name)


def two_steps(mixture: Mixture, scale: float) -> tuple[dict[str, np.ndarray], int]:
    """Weights after two optimizer steps of which the second takes the experts of the pass before both, and the number
    of choices that would have been others.
    """
    plain, samples = Reference(mixture), toy_samples(12)
    old, experts, flipped = [], [], 0
    for sample in samples:
        with torch.no_grad():
            old.append(plain.logprobs(sample))
        experts.append(torch.stack([plain.chosen[layer] for layer in range(mixture.layers)], 1))
    for step in (range(6), range(6, 12)):
        total = sum(int(samples[index].loss_mask.sum()) for index in step)
        for index in step:
            sample, mask = samples[index], torch.from_numpy(samples[index].loss_mask[1:]).double()
            plain.given = None
            with torch.no_grad():
                plain.logprobs(sample)
            now = torch.stack([plain.chosen[layer] for layer in range(mixture.layers)], 1)
            flipped += int((now.sort(-1).values != experts[index].sort(-1).values).sum())
            plain.given = experts[index]
            ratio = torch.exp(plain.logprobs(sample) - old[index])
            surrogate = torch.min(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage)
            if sample.advantage < 0:
                surrogate = surrogate.clamp(min=3 * sample.advantage)
            (-(surrogate * mask).sum() / total).backward()
        with torch.no_grad():
            for parameter in plain.model.parameters():
                parameter -= scale * parameter.grad
                parameter.grad = None
    return plain.saved(), flipped


@pytest.mark.parametrize(
    "layout", ["one-rank-recompute-shared-prefixes", pytest.param("pp2-recompute", marks=pytest.mark.long)]
)
def test_later_optimizer_steps_take_the_experts_of_old_log_probs(layout: str, models: dict[str, Mixture]) -> None:
    mixture = models["qwen3-moe"]
    expected, flipped = two_steps(mixture, SCALE)
    assert flipped > 20
    found = run_ranks(LAYOUTS[layout].world_size, observe_old_policy, mixture, LAYOUTS[layout], SCALE)[0]
    for name, weights in expected.items():
        np.testing.assert_allclose(found[name], weights, rtol=0, atol=2e-4, err_msg=name)
