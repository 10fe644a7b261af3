"""Claude Code and Codex, unmodified, as ``--agent-command`` runs them, where their programs are in PATH:

    npm install -g @anthropic-ai/claude-code @openai/codex

# covers: R2
"""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path

import pytest

from miles_async.rollout.agent_command import CommandAgent
from miles_async.types import Prompt
from tests.fakes.keys import KEYS
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import CHAT, agent_of, says
from tests.integration.example_runs import trained_samples
from tests.integration.real_run import real_run
from tests.integration.tiny_models import save_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parents[2] / "examples" / "blackbox_agent"
CALLS = {
    "claude": {"name": "Bash", "arguments": {"command": "expr 17 '*' 4", "description": "Multiply"}},
    "codex": {"name": "exec_command", "arguments": {"cmd": "expr 17 '*' 4"}},
}
each_program = pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"there is no {name} in PATH"))
        for name in CALLS
    ],
)


@each_program
async def test_a_conversation_with_a_command_is_one_branch(program: str, tmp_path: Path) -> None:
    call = f"<tool_call>\n{json.dumps(CALLS[program])}\n</tool_call>"
    model = ScriptedModel(says(call, "It is 68."))
    agent = CommandAgent(str(SCRIPTS / f"{program}.sh"), log_path=tmp_path / "log", api_key=KEYS.sessions.agents)
    async with agent_of(model, timeout=600.0, max_response=20_000, max_total=400_000) as session:
        await agent(session.opened.base_url, Prompt(prompt_id="p", token_ids=(1,), text="17*4?"))
        sample = (await session.collect()).sample
    assert sample is not None
    (trained,) = [branch.tokens[branch.loss_mask == 1].tolist() for branch in sample.branches]
    assert trained == [*chain.from_iterable(model.said)]
    assert "68" in CHAT.decode_all(model.requests[-1]).rpartition(call)[2]


@each_program
def test_a_tiny_model_is_trained_on_what_it_said(program: str, tmp_path: Path) -> None:
    """Log-probs of engine and trainer are compared token by token, so the tokens sampled are the tokens trained."""
    tokenizer = CHAT.tokenizer
    model = save_tiny("qwen3-tied", tmp_path / "model", vocab_size=len(tokenizer), max_position_embeddings=24_000)
    tokenizer.save_pretrained(model)
    (prompts := tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}*4?", "label": str(4 * n)}) + "\n" for n in range(8))
    )
    (brief := tmp_path / "brief.md").write_text("Be brief.")  # their own instructions are too long for a CPU
    less = {"claude": "--system-prompt Brief --tools Bash", "codex": f"-c model_instructions_file={brief}"}[program]
    flags = (
        *("--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--record"),
        *("--agent-command", f"{SCRIPTS / program}.sh {less}", "--agent-timeout", "300"),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--num-rollout", "2"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-concurrency-per-engine", "2"),
        *("--rollout-max-response-len", "40", "--max-tokens-per-gpu", "24000", "--stall-timeout", "800"),
        *("--eval-prompt-data", "none", "--eval-interval", "none", "--no-log-entropy"),
    )
    with real_run(tmp_path / "run", *flags) as run:
        assert run.wait(800) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]
    assert run.summary["groups"]["failed"] == 0
    assert run.summary["logprob_diff"]["max"] < 1e-4
    samples = [*trained_samples(run)]
    assert len(samples) == 2 * 2 * 2
    for sample in samples:
        assert "*4?" in str(sample.metadata["messages"])
        assert sum(branch.loss_mask.sum() for branch in sample.branches) > 0
