"""Flags that profile a step: which ranks they name, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.debug_checks import check_profiling
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.parser import assemble
from miles_async.runs.checks import device_problems
from miles_async.runtime import device


def arguments(**flags: FlagValue) -> Arguments:
    """40 steps on 2 ranks."""
    return assemble({"num_rollout": 40, "actor_num_gpus_per_node": 2, **flags}, {})


@pytest.mark.parametrize(
    ("words", "ranks"), [(("0",), {0}), (("1",), {1}), (("0", "1"), {0, 1}), (("1", "1"), {1}), (("all",), {0, 1})]
)
def test_ranks_by_number_or_all(words: tuple[str, ...], ranks: set[int]) -> None:
    given = arguments(profile_step=40, profile_ranks=words)
    assert given.debug.profiled_ranks(given.cluster.trainer_world_size) == ranks
    assert not list(check_profiling(given))


@pytest.mark.parametrize("words", [("2",), ("0", "2"), ("-1",), ("all", "0"), ("first",), ("1.0",), ()])
def test_ranks_that_the_trainer_does_not_have(words: tuple[str, ...]) -> None:
    [problem] = check_profiling(arguments(profile_step=1, profile_ranks=words))
    assert problem.startswith("--profile-ranks: expected ranks from 0 to 1, or all, found ")


def test_a_step_after_the_last_one() -> None:
    [problem] = check_profiling(arguments(profile_step=41))
    assert problem == "--profile-step 41: the run ends after step 40 (--num-rollout)"


def test_a_run_that_trains_nothing() -> None:
    [problem] = check_profiling(arguments(profile_step=1, debug_rollout_only=True))
    assert problem.startswith("--profile-step 1 with --debug-rollout-only")


def test_a_cpu_has_no_history_of_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count_gpus", lambda: 0)
    [problem] = device_problems(arguments(profile_step=1, record_memory_history=True))
    assert problem.startswith("--record-memory-history on a machine without GPUs: PyTorch records")
    assert not list(device_problems(arguments(profile_step=1)))
