"""Engines against what was staged: every way to be wrong is found, by digests or by log-probs, and no way to be right
is one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from miles_async.arguments import WeightsArguments
from miles_async.engines.sglang.region_digest import Region, region_digests
from miles_async.runtime.tensor_digest import digest
from miles_async.types import CanaryScore, HeldPart, HeldWeights, StagedWeights, TensorMeta, TensorShare
from miles_async.weights.verify import CanaryVerdict, canary_tokens, canary_tolerance, compare_digests, judge_canary

Weights = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------------------- digests
def weights(seed: int = 0) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q": (64, 64), "experts.0.up": (32, 64), "experts.1.up": (32, 64), "norm": (64,), "scale": ()}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def staged(sent: Weights) -> StagedWeights:
    def describe(name: str, tensor: torch.Tensor) -> TensorMeta:
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        shape = tuple(tensor.shape)
        return TensorMeta(name, str(tensor.dtype)[6:], shape, digest(raw, tensor.itemsize, shape))

    bucket = tuple(describe(name, tensor) for name, tensor in sent.items())
    return StagedWeights(version=1, directory="", buckets={0: bucket}, total_bytes=0)


def part(tensor: torch.Tensor, offset: int = 0, strides: tuple[int, ...] | None = None, row: int = 0) -> HeldPart:
    strides = tensor.contiguous().stride() if strides is None else strides
    row = row or (tensor.shape[-1] if tensor.ndim else 1)
    [found] = region_digests([Region(tensor, offset, strides, row)])
    return HeldPart(offset, tuple(tensor.shape), strides, str(tensor.dtype)[6:], found)


def held(found: Weights, **others: tuple[HeldPart, ...]) -> HeldWeights:
    return HeldWeights(parts={**{name: (part(tensor),) for name, tensor in found.items()}, **others})


def problem(found: HeldWeights, *skip: str) -> str:
    return str(compare_digests(staged(weights()), found, skip=skip).problem)


def test_the_same_weights_agree() -> None:
    result = compare_digests(staged(weights()), held(weights()))
    assert (result.problem, result.compared, result.incomparable) == (None, 5, ())


def one_element(found: Weights) -> None:
    found["q"][17, 3] += 1e-6


def a_transposed_matrix(found: Weights) -> None:
    found["q"] = found["q"].t().contiguous()


def swapped_experts(found: Weights) -> None:
    found["experts.0.up"], found["experts.1.up"] = found["experts.1.up"], found["experts.0.up"]


def swapped_rows(found: Weights) -> None:
    found["q"][[0, 1]] = found["q"][[1, 0]]


def a_stale_tensor(found: Weights) -> None:
    found["norm"] = weights(seed=1)["norm"]


@pytest.mark.parametrize("corrupt", [one_element, a_transposed_matrix, swapped_experts, swapped_rows, a_stale_tensor])
def test_every_corruption_is_found(corrupt: Callable[[Weights], None]) -> None:
    # covers: C8
    found = weights()
    corrupt(found)
    assert "has other elements than were sent" in problem(held(found))


def test_a_tensor_that_no_rank_holds_is_found() -> None:
    # covers: C8
    found = weights()
    del found["norm"]
    assert "norm has 64 elements, of which 0 are held" in problem(held(found))
    assert problem(held(found), "nor") == "None"


def test_a_tensor_that_was_not_sent_is_found() -> None:
    # covers: C8
    found = {**weights(), "bias": torch.ones(3)}
    assert "bias is held and was not sent" in problem(held(found))
    assert problem(held(found), "bias") == "None"
    assert problem(held(weights(), mtp=())) == "None", "given to the loader, which has no use for it"


def test_memory_that_nothing_was_sent_for_is_found() -> None:
    # covers: C8
    found = msgspec.structs.replace(held(weights()), unfilled={"layers.1.bias": 12})
    assert "layers.1.bias is a parameter of the engine's model with 12 elements other than 0" in problem(found)
    assert problem(found, "bias") == "None"


def test_tensors_in_another_form_are_named_and_not_compared() -> None:
    # covers: M16
    found = msgspec.structs.replace(held(weights(), q=()), other_form=("q",))
    result = compare_digests(staged(weights()), found, skip=("norm",))
    assert (result.problem, result.compared, result.incomparable) == (None, 3, ("q", "norm"))


def test_another_dtype_is_found() -> None:
    found = weights()
    found["norm"] = found["norm"].to(torch.bfloat16)
    assert "norm was sent as float32 and is held as bfloat16" in problem(held(found))


def sharded(tensor: torch.Tensor, dimension: int) -> tuple[HeldPart, ...]:
    half = tensor.shape[dimension] // 2
    pieces = [tensor.narrow(dimension, start, half) for start in (0, half)]
    return tuple(part(piece.clone(), piece.storage_offset(), piece.stride(), tensor.shape[-1]) for piece in pieces)


@pytest.mark.parametrize("dimension", [0, 1])
def test_shards_of_several_ranks_are_one_tensor(dimension: int) -> None:
    shards = sharded(weights()["q"], dimension)
    assert problem(held(weights(), q=shards)) == "None"
    assert "of which 2048 are held" in problem(held(weights(), q=shards[:1]))


def test_ranks_that_hold_the_same_part_have_to_agree() -> None:
    norm = part(weights()["norm"])
    assert problem(held(weights(), norm=(norm, norm))) == "None"
    other = msgspec.structs.replace(norm, digest="0" * 16)
    assert "norm is not the same on all ranks" in problem(held(weights(), norm=(norm, other)))


def test_every_tensor_is_in_one_of_the_shares() -> None:
    """A share's tensors are compared element by element; of the others only that they are held."""
    # covers: C8
    wrong = weights()
    one_element(wrong)
    shares = [TensorShare(index, 8) for index in range(8)]
    results = [compare_digests(staged(weights()), held(wrong), share=share) for share in shares]
    assert sum(result.compared for result in results) == len(weights())
    assert [result.problem is not None for result in results].count(True) == 1
    missing = held(weights(), q=())
    assert all(compare_digests(staged(weights()), missing, share=share).problem for share in shares)


# ---------------------------------------------------------------------------------------------- the canary
TOKENS = 256
VOCABULARY = 151_936
draw = np.random.default_rng(0)


def judged(
    found: np.ndarray, new: np.ndarray, old: np.ndarray | None = None, *, bf16: bool = True, given: float | None = None
) -> CanaryVerdict:
    tokens = tuple(range(len(new) + 1))
    sent = StagedWeights(
        version=7,
        directory="",
        buckets={},
        total_bytes=0,
        canary_tokens=tokens,
        canary_logprobs=tuple(new),
        previous_canary_logprobs=() if old is None else tuple(old),
    )
    return judge_canary(
        sent,
        CanaryScore("7", np.asarray(found)),
        canary_tolerance(WeightsArguments(canary_tolerance=given), bf16=bf16, device="cpu"),
    )


def vocabulary_logprobs(logits: np.ndarray) -> np.ndarray:
    """[positions] of the likely token at each; ``logits``: [positions, vocabulary]."""
    shifted = logits - logits.max(1, keepdims=True)
    return shifted[:, 0] - np.log(np.exp(shifted).sum(1))


@pytest.mark.parametrize("sigma", [4.0, 6.0])
@pytest.mark.parametrize("error", [0.01, 0.02])
def test_rounding_passes_over_a_real_vocabulary_and_wrong_weights_fail(sigma: float, error: float) -> None:
    # covers: C8
    logits = draw.normal(0, sigma, (32, VOCABULARY))
    logits[:, 0] += 3 * sigma  # text is not random
    expected = vocabulary_logprobs(logits)
    rounded = vocabulary_logprobs(logits + error * draw.normal(0, sigma, logits.shape))
    verdict = judged(rounded, expected)
    assert verdict.problem is None
    assert 0.005 < verdict.difference < 0.2
    garbage = vocabulary_logprobs(draw.normal(0, sigma, logits.shape))
    assert "canary log-probs differ by" in str(judged(garbage, expected).problem)


def test_fp32_products_on_a_gpu_may_be_less_exact_than_on_a_cpu() -> None:
    assert (
        canary_tolerance(WeightsArguments(), bf16=False, device="cpu")
        < canary_tolerance(WeightsArguments(), bf16=False, device="cuda")
        < 0.05
    )
    assert canary_tolerance(WeightsArguments(), bf16=True, device="cuda") == canary_tolerance(
        WeightsArguments(), bf16=True, device="cpu"
    )


@pytest.mark.parametrize("bf16", [True, False])
def test_engines_that_round_weights_may_differ_by_more(bf16: bool) -> None:
    assert canary_tolerance(WeightsArguments(rollout_quantization="fp8"), bf16=bf16, device="cuda") == 0.75
    given = WeightsArguments(rollout_quantization="fp8", canary_tolerance=0.1)
    assert canary_tolerance(given, bf16=bf16, device="cuda") == 0.1


def test_a_few_tokens_may_differ_by_anything() -> None:
    new = draw.normal(-2, 1, TOKENS)
    found = new.copy()
    found[:10] += 1.0
    assert judged(found, new).problem is None
    found[10:40] += 1.5
    assert "at the 90% quantile" in str(judged(found, new).problem)


@pytest.mark.parametrize("tokens", [1, 2, 3, 10, 11, 255])
def test_the_quantile_is_interpolated_as_numpy_does(tokens: int) -> None:
    new = draw.normal(-2, 1, tokens)
    found = new + draw.uniform(5, 9, tokens)
    quantile = np.quantile(np.abs(found - new), 0.9)
    assert f"by {quantile:.3g} at the 90% quantile" in str(judged(found, new).problem)


def rounded(logprobs: np.ndarray, noise: str, scale: float) -> np.ndarray:
    """As a forward pass in low precision has them; in a mixture of experts few tokens have most of the noise."""
    if noise == "heavy":
        return logprobs + scale * draw.standard_cauchy(len(logprobs)).clip(-20, 20)
    return logprobs + scale * draw.normal(0, 1, len(logprobs))


@pytest.mark.parametrize("noise", ["normal", "heavy"])
def test_an_engine_nearer_to_the_version_before_fails(noise: str) -> None:
    """All within the tolerance of the new version."""
    # covers: C8
    for _ in range(100):
        old = draw.normal(-2, 1, TOKENS)
        new = old + draw.normal(0, 0.2, TOKENS)
        trained = [rounded(version, noise, 0.005) for version in (new, old)]
        fresh, stale = (judged(rounded(version, noise, 0.005), *trained) for version in (new, old))
        assert (fresh.problem, fresh.tells_versions_apart) == (None, True)
        assert "nearer to the version before than to version 7: by" in str(stale.problem)


@pytest.mark.parametrize("tokens", [2, 16, TOKENS])
@pytest.mark.parametrize("noise", ["normal", "heavy"])
@pytest.mark.parametrize("step", [0.0, 1e-4])
def test_versions_that_are_nearer_than_the_noise_are_not_told_apart(step: float, noise: str, tokens: int) -> None:
    """A step in bf16 at a learning rate of 1e-6 is such: on a GPU the trainer's own log-probs differ by more."""
    # covers: C8
    for _ in range(500):
        old = draw.normal(-2, 1, tokens)
        new = old + draw.normal(0, step, tokens)
        trained = [rounded(version, noise, 0.005) for version in (new, old)]
        for version in (new, old):
            verdict = judged(rounded(version, noise, 0.005), *trained)
            assert (verdict.problem, verdict.tells_versions_apart) == (None, False)


def test_without_another_version_none_is_told_apart() -> None:
    new = draw.normal(-2, 1, TOKENS)
    assert not judged(new, new, new).tells_versions_apart, "the same weights"
    assert not judged(new, new).tells_versions_apart, "there was none before"


@pytest.mark.parametrize("found", [[-1.0, float("nan")], [-1.0], [-1.0, float("-inf")]])
def test_log_probs_that_are_no_numbers_or_too_few_fail(found: list[float]) -> None:
    assert "finite log-probs" in str(judged(np.array(found), np.array([-1.0, -2.0])).problem)


def test_a_tolerance_that_is_given_is_taken_also_if_it_is_zero() -> None:
    new = draw.normal(-2, 1, TOKENS)
    assert judged(new, new, given=0.0).problem is None
    assert judged(new + 1e-9, new, given=0.0).problem is not None


def test_the_canary_is_made_of_the_prompts() -> None:
    assert canary_tokens([[5, 6], [7, 8, 9], [1]], 64, length=4) == (5, 6, 7, 8)
    assert canary_tokens([[5, 6]], 64, length=4) == (5, 6)
    random = canary_tokens([[5]], 64, length=4)
    assert len(random) == 4
    assert random == canary_tokens([], 64, length=4)
