"""Black-box agents: what they return, whose fault their failures are, and commands as agents.

# covers: A3, A4
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import openai
import pytest
from msgspec.structs import replace

from miles_async.api import Agent
from miles_async.errors import ConfigurationError, RequestRejectedError, ServiceUnavailableError, TransientEngineError
from miles_async.rollout import agent_command, process_tree
from miles_async.rollout.agent import AgentGenerate
from miles_async.rollout.agent_command import CommandAgent
from miles_async.runtime.hooks import load_object
from miles_async.types import Attempt, Branch, CollectedSession, OpenSession, Prompt, RewardParts, Sample
from miles_async.types.pictures import data_url
from tests.fakes.keys import KEYS
from tests.fakes.pictures import picture
from tests.fakes.scripted_model import ScriptedModel
from tests.property.builders import make_sample
from tests.unit.runtime.processes.waiting import gone
from tests.waiting import until

PROMPT = Prompt(
    prompt_id="p0",
    token_ids=(1,),
    text="rev 12",
    messages=({"role": "user", "content": "rev 12"},),
    label="21",
    metadata={"level": 3},
)
ATTEMPT = Attempt(attempt_id=7, prompt=PROMPT, epoch=0)


def sample() -> Sample:
    return replace(make_sample([0], reward=None), metadata={"turns": 2})


def collected(**fields: object) -> CollectedSession:
    nothing_wrong: dict[str, object] = {
        "ending": "finished",
        "sample": sample(),
        "reward": None,
        "cut": False,
        "failure": None,
        "waiting": False,
    }
    return CollectedSession(**{**nothing_wrong, **fields})


class FakeSessions:
    def __init__(self, outcome: CollectedSession | Exception) -> None:
        self.outcome = outcome
        self.calls: list[str] = []

    async def open(self, routing_key: str) -> OpenSession:
        self.calls.append(f"open {routing_key}")
        return OpenSession(
            session_id="s", instance_id="i", url="http://x/sessions/s", base_url="http://x/sessions/s/v1"
        )

    async def collect(self, session: OpenSession) -> CollectedSession:
        self.calls.append("collect")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def abandon(self, session: OpenSession) -> None:
        self.calls.append("abandon")


async def outcome_of(
    agent: Callable[[str, Prompt], Awaitable[object]], outcome: CollectedSession | Exception, *, timeout: float = 5.0
) -> Sample:
    generate = AgentGenerate(sessions=FakeSessions(outcome), run_agent=agent, timeout=timeout)
    return await generate(ScriptedModel(lambda call, input_ids: []), ATTEMPT, 3)


async def test_an_agent_gets_the_images_of_its_prompt_and_samples_share_them() -> None:
    shown, drawn = picture(), picture(3, 3)
    content = [{"type": "text", "text": "What is it?"}, {"type": "image"}]
    prompt = replace(PROMPT, messages=({"role": "user", "content": content},), pictures=(shown,))
    told: list[Prompt] = []

    async def look(base_url: str, prompt: Prompt) -> int:
        told.append(prompt)
        return 1

    more = Branch(**{name: getattr(sample(), name) for name in Branch.__struct_fields__})
    more = replace(more, pictures=(replace(drawn, content=b""),))
    whole = replace(sample(), pictures=(replace(shown, content=b""), drawn), more_branches=(more,))
    sessions = FakeSessions(collected(sample=whole))
    generate = AgentGenerate(sessions=sessions, run_agent=look, timeout=5.0)
    made = await generate(ScriptedModel(lambda call, input_ids: []), replace(ATTEMPT, prompt=prompt), 1)
    assert told[0].messages[0]["content"][1] == {"type": "image_url", "image_url": {"url": data_url(shown)}}
    assert made.pictures[0] is shown
    assert made.pictures[1] is made.more_branches[0].pictures[0]
    assert made.pictures[1] == drawn


def returns(value: object) -> Callable[[str, Prompt], Awaitable[object]]:
    async def agent(base_url: str, prompt: Prompt) -> object:
        assert (base_url, prompt) == ("http://x/sessions/s/v1", PROMPT)
        return value

    return agent


def raises(error: BaseException) -> Callable[[str, Prompt], Awaitable[object]]:
    async def agent(base_url: str, prompt: Prompt) -> object:
        raise error

    return agent


# ------------------------------------------------------------------------------------------------ what it returns
@pytest.mark.parametrize(
    ("returned", "given", "turns", "reward"),
    [
        (None, None, None, None),  # the run's reward decides
        (3, None, 3, None),
        ((3, 0.5), None, 3, 0.5),
        ([3, 1], None, 3, 1.0),
        ((3, None), 0.25, 3, 0.25),
        (3, 0.25, 3, 0.25),  # told to the session server
    ],
)
async def test_an_agent_returns_turns_or_turns_and_reward(
    returned: object, given: object, turns: object, reward: object
) -> None:
    result = await outcome_of(returns(returned), collected(reward=given))
    assert (result.metadata["agent_turns"], result.reward) == (turns, reward)
    assert result.metadata["turns"] == 2  # and what the session noted stays


PARTS = {"reward": 1.25, "parts": {"right": 1, "short": 0.25}}


@pytest.mark.parametrize(
    ("returned", "given"),
    [
        ((3, RewardParts(reward=np.float32(1.25), parts={"right": 1, "short": np.float64(0.25)})), None),
        ([3, PARTS], 0.5),  # as commands print it; it wins
        (3, RewardParts(**PARTS)),  # told to the session server
    ],
)
async def test_an_agents_reward_may_have_parts(returned: object, given: object) -> None:
    sample = await outcome_of(returns(returned), collected(reward=given))
    assert sample.reward == 1.25
    assert (sample.metadata["agent_turns"], sample.metadata["turns"]) == (3, 2)
    assert sample.metadata["metrics"] == {"right": 1.0, "short": 0.25}


@pytest.mark.parametrize(
    "reward",
    [
        {"reward": 1.0},
        {"reward": "1", "parts": {}},
        {"reward": 1.0, "parts": {"right": "yes"}},
        RewardParts(reward=float("nan"), parts={}),
        RewardParts(reward=1.0, parts={"right": "yes"}),  # type: ignore[dict-item]
        RewardParts(reward=1.0, parts=3),  # type: ignore[arg-type]
        True,
        "1",
    ],
)
async def test_a_reward_that_is_none_costs_the_attempt(reward: object) -> None:
    with pytest.raises(RequestRejectedError, match="RewardParts"):
        await outcome_of(returns((3, reward)), collected())


async def test_sessions_are_keyed_by_sample_and_over_when_the_agent_is_cancelled() -> None:
    sessions = FakeSessions(collected())

    async def hang(base_url: str, prompt: Prompt) -> None:
        await asyncio.sleep(60)

    generate = AgentGenerate(sessions=sessions, run_agent=hang, timeout=60)
    task = asyncio.ensure_future(generate(ScriptedModel(lambda call, input_ids: []), ATTEMPT, 3))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sessions.calls == ["open 7-3", "abandon"]


# ---------------------------------------------------------------------------------------------------- whose fault
async def refused_connection() -> Exception:
    """The error that the openai client raises when nobody listens."""
    async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIConnectionError) as caught:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        return caught.value


async def test_failures_of_infrastructure_are_told_from_the_agents_own() -> None:
    cases = [
        (raises(KeyError("answer")), collected(), RequestRejectedError, "KeyError"),
        (raises(await refused_connection()), collected(sample=None), ServiceUnavailableError, "connect"),
        (raises(TimeoutError("search")), collected(), ServiceUnavailableError, "search"),
        (raises(SystemExit(2)), collected(), RequestRejectedError, "the agent raised SystemExit"),
        (raises(asyncio.CancelledError()), collected(), RequestRejectedError, "the agent raised CancelledError"),
        (raises(KeyError("x")), collected(failure="engines are gone"), TransientEngineError, "engines are gone"),
        (returns(3), collected(failure="engines are gone"), TransientEngineError, "engines are gone"),
        (returns(3), collected(ending="expired"), TransientEngineError, "expired"),
        (raises(KeyError("x")), collected(ending="aborted"), TransientEngineError, "aborted"),
        (returns(3), collected(sample=None), RequestRejectedError, "without a turn"),
        (returns((3, "high")), collected(), RequestRejectedError, "turns or \\(turns, reward\\)"),
        (returns(3), TransientEngineError("session lost"), TransientEngineError, "session lost"),
        (raises(KeyError("x")), TransientEngineError("session lost"), TransientEngineError, "session lost"),
    ]
    for agent, outcome, kind, words in cases:
        with pytest.raises(kind, match=words):
            await outcome_of(agent, outcome)


async def test_running_into_the_length_limit_is_no_failure() -> None:
    result = await outcome_of(raises(ValueError("context_length_exceeded")), collected(cut=True))
    assert result.reward is None


@pytest.mark.parametrize(("waiting", "kind"), [(True, TransientEngineError), (False, RequestRejectedError)])
async def test_an_agent_whose_time_is_up_was_slow_itself_or_waited_for_engines(waiting: bool, kind: type) -> None:
    async def hang(base_url: str, prompt: Prompt) -> None:
        await asyncio.sleep(60)

    with pytest.raises(kind, match="--agent-timeout"):
        await outcome_of(hang, collected(waiting=waiting), timeout=0.02)


@pytest.mark.parametrize(("waiting", "kind"), [(True, TransientEngineError), (False, ServiceUnavailableError)])
async def test_an_agents_client_that_gives_up_on_engines_is_no_outage_of_a_service(waiting: bool, kind: type) -> None:
    async def give_up(base_url: str, prompt: Prompt) -> None:
        raise RuntimeError("request timed out") from TimeoutError()

    with pytest.raises(kind, match="request timed out"):
        await outcome_of(give_up, collected(waiting=waiting))


def test_an_agent_is_checked_at_the_start() -> None:
    assert load_object(f"{__name__}:OwnAgent", Agent, "--agent-path")


class OwnAgent:
    async def __call__(self, base_url: str, prompt: Prompt) -> int:
        return 1


# ------------------------------------------------------------------------------------------------------- commands
def command(tmp_path: Path, source: str) -> CommandAgent:
    (tmp_path / "agent.py").write_text(source)
    return CommandAgent(
        f"python '{tmp_path}/agent.py'", log_path=tmp_path / "logs" / "agents.log", api_key=KEYS.sessions.agents
    )


async def test_a_command_is_given_its_session_and_the_prompt(tmp_path: Path) -> None:
    # covers: A7
    source = (
        "import json, os, sys\n"
        "prompt = json.load(sys.stdin)\n"
        "print('thinking', file=sys.stderr)\n"
        "print('some output')\n"
        "print(json.dumps([[os.environ['OPENAI_BASE_URL'], prompt, sys.executable], 0.5]))\n"
    )
    turns, reward = await command(tmp_path, source)("http://x/v1", PROMPT)
    expected = {key: getattr(PROMPT, key) for key in ("prompt_id", "text", "label", "metadata")}
    assert turns == ["http://x/v1", {**expected, "messages": list(PROMPT.messages)}, sys.executable]
    assert reward == 0.5
    assert (tmp_path / "logs" / "agents.log").read_text() == "thinking\n"


async def test_a_log_that_has_grown_large_is_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_command, "_LOG_BYTES", 10)
    for number in range(4):
        await command(tmp_path, f"import sys\nprint('number {number}', file=sys.stderr)")("http://x/v1", PROMPT)
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {"agents.log.1": "number 0\nnumber 1\n", "agents.log": "number 2\nnumber 3\n"}


async def test_a_command_has_the_key_of_agents_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C13
    monkeypatch.setenv("OPENAI_API_KEY", "of the user, for somebody else")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of the user, too")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "which clients would prefer")
    monkeypatch.setenv("MILES_ASYNC_ADMIN_KEY", "of the run")
    source = "import json, os\nprint(json.dumps([dict(os.environ), 0.5]))\n"
    environment, _ = await command(tmp_path, source)("http://x/v1", PROMPT)
    assert environment["OPENAI_API_KEY"] == KEYS.sessions.agents.reveal()
    assert environment["ANTHROPIC_API_KEY"] == KEYS.sessions.agents.reveal()
    assert environment["ANTHROPIC_BASE_URL"] == "http://x"
    assert "ANTHROPIC_AUTH_TOKEN" not in environment
    assert "MILES_ASYNC_ADMIN_KEY" not in environment


@pytest.mark.parametrize("exceptions", [None, "inside.example"])
async def test_a_command_reaches_its_session_without_a_proxy_and_the_outside_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exceptions: str | None
) -> None:
    # covers: A6
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    if exceptions:
        monkeypatch.setenv("no_proxy", exceptions)
    source = (
        "import json, httpx\n"
        "from httpx._utils import get_environment_proxies\n"  # what the openai client is made with
        "print(json.dumps([get_environment_proxies(), 0]))\n"
    )
    proxies, _ = await command(tmp_path, source)("http://10.0.0.7:8000/sessions/1/v1", PROMPT)
    assert proxies.pop("http://") == "http://proxy.example:3128"
    kept = {f"all://*{exceptions}": None} if exceptions else {}
    assert proxies == {"all://10.0.0.7": None, "all://127.0.0.1": None, "all://localhost": None, **kept}


@pytest.mark.parametrize(("printed", "returned"), [("", None), ("done", None), ("3", 3), ("x\n[2, 1.0]", [2, 1.0])])
async def test_the_last_line_of_a_command_may_be_what_it_returns(
    tmp_path: Path, printed: str, returned: object
) -> None:
    assert await command(tmp_path, f"print({printed!r})")("http://x/v1", PROMPT) == returned


@pytest.mark.parametrize(("status", "kind"), [(1, RequestRejectedError), (75, ConnectionError)])
async def test_a_command_that_fails_says_so_with_its_last_words(tmp_path: Path, status: int, kind: type) -> None:
    with pytest.raises(kind, match=f"status {status}") as caught:
        await command(tmp_path, f"print('no key'); raise SystemExit({status})")("http://x/v1", PROMPT)
    assert status == 75 or "no key" in str(caught.value)


async def test_a_command_that_cannot_be_run_says_so(tmp_path: Path) -> None:
    for program in ("no-such-command", str(tmp_path / "absent.py"), "MODEL=1 python agent.py"):
        with pytest.raises(ConfigurationError, match=rf"--agent-command {program}: there is no program .* sh -c"):
            CommandAgent(program, log_path=tmp_path / "agents.log", api_key=KEYS.sessions.agents)
    script = tmp_path / "agent"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o700)
    agent = CommandAgent(str(script), log_path=tmp_path / "agents.log", api_key=KEYS.sessions.agents)
    with pytest.raises(RequestRejectedError, match="status 127"):
        await agent("http://x/v1", PROMPT)
    assert f"{script}: " in (tmp_path / "agents.log").read_text()


async def test_temporary_files_of_a_command_go_with_it(tmp_path: Path) -> None:
    source = "import json, tempfile\nprint(json.dumps([tempfile.mkstemp()[1], 0.5]))"
    agent = command(tmp_path, source)
    places = {Path((await agent("http://x/v1", PROMPT))[0]).parent for _ in range(2)}
    assert len(places) == 2
    assert not any(place.exists() for place in places)
    assert all(place.parent.exists() for place in places), "a directory of the run's own, which is swept"


async def test_only_the_end_of_what_a_command_prints_is_read(tmp_path: Path) -> None:
    source = "for _ in range(50): print('x' * 100_000)\nprint('[2, 0.5]')"
    assert await command(tmp_path, source)("http://x/v1", PROMPT) == [2, 0.5]


# Starts a process that holds stdout: a child; one in its own session; one whose parent is gone, too (a daemon).
LEAVES_BEHIND = """
import json, os, subprocess, sys
def sleeper(**options):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **options).pid
read, write = os.pipe()
if not (middle := os.fork()):
    os.setsid()
    os.write(write, str(sleeper(start_new_session=True)).encode())
    os._exit(0)
os.waitpid(middle, 0)
pids = [sleeper(), sleeper(start_new_session=True), int(os.read(read, 100))]
with open(PIDS + ".new", "w") as file:
    json.dump([os.getpid(), *pids], file)
os.rename(PIDS + ".new", PIDS)
"""


def left_behind(tmp_path: Path, then: str) -> str:
    return f"PIDS = {str(tmp_path / 'pids')!r}{LEAVES_BEHIND}{then}\n"


async def started(tmp_path: Path) -> list[int]:
    await until((tmp_path / "pids").exists)
    return json.loads((tmp_path / "pids").read_text())


async def test_processes_that_a_command_leaves_behind_cost_no_time_and_end_with_it(tmp_path: Path) -> None:
    agent = command(tmp_path, left_behind(tmp_path, "print('[3, 1.0]')"))
    async with asyncio.timeout(20):
        assert await agent("http://x/v1", PROMPT) == [3, 1.0]
    pids = await started(tmp_path)
    assert len(pids) == 4
    assert all(map(gone, pids))


async def test_a_command_that_is_not_wanted_any_more_is_gone_with_all_that_it_started(tmp_path: Path) -> None:
    task = asyncio.ensure_future(
        command(tmp_path, left_behind(tmp_path, "import time; time.sleep(60)"))("http://x/v1", PROMPT)
    )
    pids = await started(tmp_path)
    assert not any(map(gone, pids))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: all(map(gone, pids)))


async def test_a_command_ends_with_the_process_that_runs_it_whatever_it_started(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(left_behind(tmp_path, "import time; time.sleep(60)"))
    runs_it = "import os, subprocess, sys; a = sys.argv; subprocess.run([a[1], a[2], str(os.getpid()), a[1], a[3]])"
    words = (sys.executable, process_tree.__file__, str(tmp_path / "agent.py"))
    runner = await asyncio.create_subprocess_exec(sys.executable, "-c", runs_it, *words)
    pids = await started(tmp_path)
    runner.kill()
    await runner.wait()
    await until(lambda: all(map(gone, pids)))
