"""Trajectories of several turns: an environment, tools, or an agent that talks to the session server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from miles_async.arguments.flag import flag
from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError

AUTO = "auto"
"""Name of the parser that the chat template needs."""

TOOL_CALL_PARSERS = tuple(
    """
    apertus2509 beam cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 deepseekv41 dots glm
    glm45 glm47 gpt-oss k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3 mimo minicpm5 mistral muse
    poolside_v1 pythonic qwen qwen25 qwen3_coder spark25 step3 step3p5 minimax-m2 minimax-m3 nanbeige
    trinity interns1 hermes hunyuan gigachat3 gigachat35 gemma4 inkling iquest_q1 response_template
    """.split()
)
"""SGLang's parsers of tool calls (sglang.srt.function_call.parser_names, 0.5.23)."""

REASONING_PARSERS = tuple(
    """
    apertus2509 beam deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots glm45 ling3 hunyuan gpt-oss
    k2_horizon kimi kimi_k2 kimi_k3 mimo muse poolside_v1 qwen3 qwen3-thinking minimax
    minimax-append-think minimax-m3 nanbeige step3 step3p5 mistral nemotron_3 granite_thinking_parser interns1 gemma4
    inkling iquest_q1 cohere_command4 gigachat35 response_template
    """.split()
)
"""SGLang's parsers of reasoning (sglang.srt.parser.reasoning_parser_names, 0.5.23)."""

TurnHistory = Literal["sampled", "template"]
McpSessions = Literal["episode", "run"]

ENVIRONMENTS = ("gymnasium", "reasoning_gym", "verifiers", "openenv", "nemo-gym")
"""Kinds of ``--environment``."""

_SERVERS = ("openenv", "nemo-gym")  # kinds whose name is the URL of a server
_ACTED_ON = ("gymnasium", *_SERVERS)

_EPISODES = ("environment", "environment_path", "mcp_server")
_AGENTS = ("environment=verifiers", "agent_path", "agent_command")
_SEVERAL_TURNS = (*_EPISODES, "agent_path", "agent_command", "custom_generate_function_path")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionsArguments:
    """Trajectories"""

    environment: str | None = flag(
        None,
        "environment of another package, with its prompts: gymnasium:ID (text alone), reasoning_gym:TASK, "
        "verifiers:NAME, or a server that plays it, openenv:URL or nemo-gym:URL",
        metavar="KIND:NAME",
    )
    environment_config: str | None = flag(
        None, "settings of --environment: a JSON object", metavar="JSON", needs=("environment",)
    )
    environment_prompts: int = flag(
        1000, "prompts that --environment generates, unless --prompt-data is given", needs=("environment",), at_least=1
    )
    environment_eval_prompts: int = flag(
        0, "further prompts that it generates, held out for evaluation", needs=("environment",), at_least=0
    )
    environment_python: str | None = flag(
        None,
        "Python that has the package of --environment verifiers:NAME, which doesn't fit into this one",
        metavar="PATH",
        needs=("environment=verifiers",),
    )
    environment_path: str | None = flag(
        None,
        "module:attr of your Environment: a class, or a function that makes one for a prompt",
        metavar="MODULE:ATTR",
    )
    environment_timeout: float = flag(
        60.0, "seconds one step of an environment may take", metavar="SECONDS", needs=_EPISODES, above=0
    )
    mcp_server: tuple[str, ...] = flag(
        (),
        "MCP servers whose tools the model may call, in an environment or alone: commands, which speak by standard "
        "input and output, or URLs (streamable HTTP)",
        metavar="COMMAND|URL",
    )
    mcp_sessions: McpSessions = flag(
        "episode",
        "sessions with MCP servers. episode: one per episode (of a command: a process), for servers with state; run: "
        "one that all episodes share",
        needs=("mcp_server",),
    )
    agent_path: str | None = flag(
        None, "module:attr of your Agent, a coroutine that is given the URL of its session", metavar="MODULE:ATTR"
    )
    agent_command: str | None = flag(
        None, "command that is an agent: OPENAI_BASE_URL is its session, the prompt is on its standard input"
    )
    agent_timeout: float = flag(600.0, "seconds one agent may run", metavar="SECONDS", needs=_AGENTS, above=0)
    session_timeout: float = flag(
        300.0,
        "seconds without a request or heartbeat after which a session expires",
        metavar="SECONDS",
        needs=_AGENTS,
        above=0,
    )
    session_server_workers: int = flag(
        1,
        "processes of the session server; one takes 1,500 to 2,000 short turns per second of its core",
        needs=_AGENTS,
        at_least=1,
        at_most=1000,
    )
    max_turns: int = flag(
        16,
        "turns of the model in one trajectory",
        needs=_SEVERAL_TURNS,
        at_least=1,
    )
    max_tokens_per_turn: int | None = flag(
        None,
        "tokens of one turn of the model (default: what is left of --rollout-max-response-len, which counts all turns "
        "and the text between them)",
        needs=_SEVERAL_TURNS,
        at_least=1,
    )
    tool_call_parser: str | None = flag(
        AUTO,
        "how tool calls are written: a parser of SGLang, such as qwen or llama3; auto: the one that the chat template "
        "needs, if any; module:attr: your own; none: calls stay text",
        metavar="NAME",
        needs=_SEVERAL_TURNS,
    )
    reasoning_parser: str | None = flag(
        AUTO,
        "how reasoning is marked: a parser of SGLang, such as qwen3 (or think) or deepseek-r1; auto: the one that the "
        "chat template needs, if any; none: it stays in the content",
        metavar="NAME",
        needs=_SEVERAL_TURNS,
    )
    turn_history: TurnHistory = flag(
        "sampled",
        "tokens each turn continues. sampled: the earlier turns' tokens; template: the conversation as the chat "
        "template renders it, as in production, which starts a new branch where it differs from what was sampled "
        "(such as without earlier reasoning)",
        needs=_SEVERAL_TURNS,
    )

    @property
    def runs_agent(self) -> bool:
        """True if trajectories come from an agent, through the session server."""
        return self.plays_verifiers or self.agent_path is not None or self.agent_command is not None

    @property
    def plays_verifiers(self) -> bool:
        """True if tasks of verifiers play themselves, as an agent."""
        return self.environment is not None and self.environment.startswith("verifiers:")

    @property
    def plays_episodes(self) -> bool:
        """True if trajectories are episodes of an environment, or of tools."""
        acts = self.environment is not None and self.environment.partition(":")[0] in _ACTED_ON
        return acts or self.environment_path is not None or bool(self.mcp_server)

    @property
    def may_reward(self) -> bool:
        """True if trajectories may come with a reward; tools alone give none."""
        return self.environment is not None or self.environment_path is not None or self.runs_agent

    @property
    def is_multi_turn(self) -> bool:
        """True if trajectories may have several turns."""
        return self.plays_episodes or self.runs_agent


def parse_environment(text: str) -> tuple[str, str]:
    """Kind and name of ``--environment``. Raises ConfigurationError.

    >>> parse_environment("gymnasium:my_package:Maze-v0")
    ('gymnasium', 'my_package:Maze-v0')
    >>> parse_environment("openenv:http://10.0.0.7:8000/")
    ('openenv', 'http://10.0.0.7:8000')
    """
    kind, _, name = text.partition(":")
    if kind not in ENVIRONMENTS or not name:
        hint = did_you_mean(kind, ENVIRONMENTS, close=0.6)
        raise ConfigurationError(
            f"--environment {text}: expected KIND:NAME with one of the kinds {', '.join(ENVIRONMENTS)}{hint} (one of "
            "your own: --environment-path)"
        )
    if kind not in _SERVERS:
        return kind, name
    if not is_url(name):
        raise ConfigurationError(
            f"--environment {text}: expected the URL of its server, such as {kind}:http://127.0.0.1:8000"
        )
    return kind, name.rstrip("/")


def parse_environment_config(text: str | None) -> Mapping[str, object]:
    """Settings of ``--environment``. Raises ConfigurationError."""
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--environment-config {text}: expected a JSON object: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"--environment-config {text}: expected a JSON object, found {type(config).__name__}")
    return config


def is_url(server: str) -> bool:
    """True for a URL, False for a command of ``--mcp-server``."""
    return server.startswith(("http://", "https://"))
