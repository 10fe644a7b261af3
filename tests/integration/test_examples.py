"""Examples of agents on the real stack, for a few steps; tests/e2e/test_examples.py runs all of them to their end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import mcp_server
from tests.integration.example_runs import assert_agent_agrees, assert_turns_were_trained
from tests.integration.page_views import assert_views_show
from tests.integration.real_run import RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420), pytest.mark.long]

STEPS = 3


def run_of(example: str, run_dir: Path, *flags: str) -> RealRun:
    no_evaluation = ("--eval-prompt-data", "none", "--eval-interval", "none", "--eval-temperature", "none")
    given = ("--num-rollout", str(STEPS), *no_evaluation, "--record", *flags)
    with real_run(run_dir, *given, command=(f"examples/{example}/run.sh",)) as run:
        assert run.wait(300) == 0, run.output
        run.assert_nothing_left()
    return run


def test_an_environment_answers_turns_and_its_answers_carry_no_loss(tmp_path: Path) -> None:
    # covers: R2, R3, C2
    run = run_of("calculator_tool", tmp_path / "run")
    assert_turns_were_trained(run, STEPS, most_turns=2)
    assert all(0 < step["rollout/tool_calls/mean"] < 1 for step in run.steps)


@pytest.mark.parametrize("sessions", ["episode", "run"])
def test_tools_of_an_mcp_server_are_answered_and_leave_no_process(sessions: str, tmp_path: Path) -> None:
    # covers: R2, R3, C2
    server = "python -m examples.calculator_tool.mcp_server"
    if sessions == "episode":  # a process for each that calls it: one of the SDK takes a second to start
        server = f"python {mcp_server.__file__} {tmp_path / 'pids'} multiply"
    tools = ("--environment-path", "none", "--mcp-server", server, "--mcp-sessions", sessions)
    run = run_of("calculator_tool", tmp_path / "run", *tools, "--rm-type", "exact_match")
    samples = assert_turns_were_trained(run, STEPS, most_turns=2)
    assert all(0 < step["rollout/tool_calls/mean"] < 1 for step in run.steps)
    if sessions == "episode":
        assert len((tmp_path / "pids").read_text().split()) > sum(sample.metadata["turns"] > 1 for sample in samples)


def test_an_agent_with_an_openai_client_is_trained_on_what_its_session_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: M13, M14, R3, C2, A6, A7
    with monkeypatch.context() as patch:
        for variable in ("http_proxy", "https_proxy", "all_proxy"):  # for the outside: nothing of the run asks it
            patch.setenv(variable, "http://127.0.0.1:9")
        run = run_of("blackbox_agent", tmp_path / "run")
    assert_agent_agrees(assert_turns_were_trained(run, STEPS, most_turns=2))
    assert {len(row.turns) for row in assert_views_show(run.run_dir)} >= {1, 2}
