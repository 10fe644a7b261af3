"""Choose the run's Generate: single-turn, with an environment, by an agent, or the user's own.

A part of the composition root, for the rollout actor's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from miles_async.algorithms.advantages.rewards import with_rewards
from miles_async.api import Agent, EngineClient, Generate, GroupReward
from miles_async.arguments import Arguments
from miles_async.arguments.evaluation_sets import evaluation_sets
from miles_async.arguments.prompt_limit import trajectory_limit
from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer
from miles_async.rewards.guard import GuardedGroupReward
from miles_async.rewards.hub import resolve_group_reward, resolve_reward
from miles_async.rollout.agent import AgentGenerate, RunAgent
from miles_async.rollout.agent_command import CommandAgent, command_words
from miles_async.rollout.generate import Began, SingleTurnGenerate
from miles_async.rollout.multi_turn import GivenReward, MultiTurnGenerate
from miles_async.runtime.hooks import load_object
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.network.keys import SessionKeys
from miles_async.runtime.picture_processor import load_picture_processor
from miles_async.runtime.processes.child_process import ChildProcess
from miles_async.runtime.services import Circuit, Services
from miles_async.sessions.service import SessionService
from miles_async.sessions.session import SessionSettings
from miles_async.trajectory.taker import Limits, trajectory_factory
from miles_async.types import CollectedSession, JsonObject, OpenSession, Prompt, Rewarded, Sample
from miles_async.wiring.engines import Service
from miles_async.wiring.environments import check_environments, run_environments, verifiers_agent
from miles_async.wiring.reply_parsers import call_hook, reply_parser
from miles_async.wiring.session_process import ServerSettings


class Episodes:
    """Generates for training and evaluation, and the ``services`` that they need: servers of sessions and of tools."""

    def __init__(
        self,
        arguments: Arguments,
        client: EngineClient,
        template: ChatTemplate,
        run_dir: Path,
        services: Services,
        began: Began,
        keys: SessionKeys,
    ) -> None:
        """Starts nothing. ``began``: called with the known versions of a sample in flight. Raises
        ConfigurationError for unusable hooks.
        """
        self._arguments = arguments
        self._began = began
        self._keys = keys
        self.circuit = _circuit(arguments, services)
        self._template = template
        self._log_dir = run_dir / "logs"
        sessions = arguments.sessions
        self._images = load_picture_processor(arguments.model.directory)
        self._make_trajectory = (
            trajectory_factory(
                reply_parser(template, sessions.tool_call_parser, sessions.reasoning_parser),
                turn_history=sessions.turn_history,
                images=self._images,
            )
            if sessions.plays_episodes
            else None
        )
        self._environments = run_environments(sessions, self._log_dir) if sessions.plays_episodes else None
        self._agents = self._session_service(client) if sessions.runs_agent else None
        self._verifiers = verifiers_agent(sessions, keys.agents, self._log_dir) if sessions.plays_verifiers else None
        agents: list[Service | None] = [self._agents, self._verifiers]
        self.services: list[Service] = [
            *(self._environments.services if self._environments else ()),
            *(service for service in agents if service is not None),
        ]

    def generate(self, sampling: JsonObject, *, trained: bool) -> Generate:
        """``sampling``: SGLang's parameters, with ``max_new_tokens`` for all turns together. ``trained``: samples are
        trained on, not only evaluated.
        """
        sessions = self._arguments.sessions
        path = self._arguments.rollout.custom_generate_function_path
        if path is not None:
            return load_object(path, Generate, "--custom-generate-function-path")
        if self._agents is not None:
            may_constrain = not trained or self._arguments.algorithm.heeds_rollout_logprobs
            opened = SessionsOfRun(self._agents, dict(sampling), self._limits(sampling), may_constrain)
            return AgentGenerate(sessions=opened, run_agent=self._agent(), timeout=sessions.agent_timeout)
        if self._make_trajectory is not None:
            assert self._environments is not None
            return MultiTurnGenerate(
                make_environment=self._environments.make,
                make_trajectory=self._make_trajectory,
                sampling=sampling,
                limits=self._limits(sampling),
                max_turns=sessions.max_turns,
                step_timeout=sessions.environment_timeout,
                service=self.circuit,
                began=self._began,
            )
        return SingleTurnGenerate(sampling, self._template, began=self._began, images=self._images)

    def group_reward(self, reward: RunReward) -> GroupReward | None:
        """The reward of groups: verifiers', then the flags'."""
        if self._verifiers is None:
            return reward.group
        timeout = self._arguments.rewards.reward_timeout
        first, second = GuardedGroupReward(self._verifiers.reward_group, timeout, self.circuit), reward.group
        if second is None:
            return first

        async def both(prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Rewarded]:
            return await second(prompt, with_rewards(samples, await first(prompt, samples)))

        return both

    def _limits(self, sampling: JsonObject) -> Limits:
        return Limits(
            response=sampling["max_new_tokens"],
            total=trajectory_limit(self._arguments),
            turn=self._arguments.sessions.max_tokens_per_turn,
        )

    def _agent(self) -> RunAgent:
        sessions = self._arguments.sessions
        if self._verifiers is not None:
            return self._verifiers
        if sessions.agent_path is not None:
            return load_object(sessions.agent_path, Agent, "--agent-path")
        assert sessions.agent_command is not None
        return CommandAgent(sessions.agent_command, log_path=self._log_dir / "agents.log", api_key=self._keys.agents)

    def _session_service(self, client: EngineClient) -> SessionService:
        arguments, network = self._arguments, Network.of_run(self._arguments.cluster)
        settings = ServerSettings(
            hf_checkpoint=str(arguments.model.hf_checkpoint),
            trust_remote_code=arguments.model.trust_remote_code,
            host=network.entrance(),
            ports=(network.ports.start, network.ports.stop) if network.ports else None,
            tls=network.tls,
            session_timeout=arguments.sessions.session_timeout,
            tool_call_parser=arguments.sessions.tool_call_parser,
            reasoning_parser=arguments.sessions.reasoning_parser,
            turn_history=arguments.sessions.turn_history,
            stops=_stops(arguments),
        )

        def launch(socket: Path, worker: int, starts: int) -> ChildProcess:
            return ChildProcess(
                f"session server {worker}",
                settings.command(socket),
                log_path=self._log_dir / f"sessions-{worker}.{starts}.log",
                environment=self._keys.environment(),
            )

        workers = arguments.sessions.session_server_workers
        return SessionService(client, launch, keys=self._keys, tls=network.tls, workers=workers, began=self._began)


@dataclass(frozen=True, slots=True)
class SessionsOfRun:
    """``rollout.agent.Sessions`` with the settings of training, or of evaluation."""

    service: SessionService
    sampling: JsonObject
    limits: Limits
    may_constrain: bool

    async def open(self, routing_key: str) -> OpenSession:
        return await self.service.open(
            SessionSettings(
                routing_key=routing_key,
                sampling=self.sampling,
                limits=self.limits,
                may_constrain=self.may_constrain,
            )
        )

    async def collect(self, session: OpenSession) -> CollectedSession:
        return await self.service.collect(session)

    async def abandon(self, session: OpenSession) -> None:
        await self.service.abandon(session)


def _circuit(arguments: Arguments, services: Services) -> Circuit:
    """Circuit of services that trajectories need besides engines; only users' code reports them down."""
    origins = arguments.trajectory_origins
    if arguments.sessions.mcp_server:
        origins["--mcp-server"] = " ".join(arguments.sessions.mcp_server)
    users = [f"the service of {flag} {origin}" for flag, origin in origins.items()]
    return services.circuit(users[0] if users else "generation")


def run_template(arguments: Arguments) -> ChatTemplate:
    """The tokenizer and chat template of this run's prompts. Raises ConfigurationError."""
    plays, images = arguments.sessions.plays_episodes, load_picture_processor(arguments.model.directory)
    return ChatTemplate(
        load_tokenizer(arguments.model.directory, arguments.model.trust_remote_code),
        arguments.data.apply_chat_template,
        continues_answers=not plays,
        ends=images.placeholders if plays and images is not None else frozenset(),
        stops=_stops(arguments),
    )


def _stops(arguments: Arguments) -> tuple[str, ...]:
    """Texts that end a response, in training or in an evaluation."""
    of_evaluations = (each.stop or () for each in evaluation_sets(arguments.evaluation))
    return (*arguments.rollout.rollout_stop, *chain.from_iterable(of_evaluations))


def run_services(arguments: Arguments) -> Services:
    rollout = arguments.rollout
    return Services(outage_timeout=rollout.service_outage_timeout, max_failures=rollout.max_sample_failures)


def check_hooks(arguments: Arguments) -> None:
    """Import the hooks of a run, which loads them again. Raises ConfigurationError."""
    sessions, generate = arguments.sessions, arguments.rollout.custom_generate_function_path
    check_environments(sessions)
    if generate is not None:
        load_object(generate, Generate, "--custom-generate-function-path")
    if sessions.agent_path is not None:
        load_object(sessions.agent_path, Agent, "--agent-path")
    if sessions.agent_command is not None:
        command_words(sessions.agent_command)
    call_hook(sessions.tool_call_parser)
    held_out = (each.rewards(arguments.rewards) for each in evaluation_sets(arguments.evaluation))
    for flags in (arguments.rewards, *held_out):
        resolve_run_reward(replace(arguments, rewards=flags), run_services(arguments))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReward:
    """The rewards of training, or of a data set."""

    single: GivenReward | None  # None: what an environment or agent gives, or the group's alone
    group: GuardedGroupReward | None

    async def close(self) -> None:
        """Close both, if they have a close method."""
        for reward in (self.single, self.group):
            if reward is not None:
                await reward.close()


def resolve_run_reward(arguments: Arguments, services: Services) -> RunReward:
    """The rewards of these flags; what an environment or agent gives comes first. Raises ConfigurationError."""
    rewards, sessions = arguments.rewards, arguments.sessions
    group = resolve_group_reward(rewards, services)
    single = None
    if rewards.rm_type is not None or rewards.custom_rm_path is not None:
        single = GivenReward(resolve_reward(rewards, services))
    elif arguments.algorithm.advantage_estimator == "on_policy_distillation":
        single = GivenReward(_unrewarded)
    elif group is None and not sessions.plays_verifiers:
        single = GivenReward(None if sessions.is_multi_turn else resolve_reward(rewards, services))
    return RunReward(single=single, group=group)


async def _unrewarded(prompt: Prompt, sample: Sample) -> float:
    """The reward if only a teacher's log-probs are trained on."""
    return 0.0
