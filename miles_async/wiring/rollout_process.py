"""Build the manager and its parts from flags, in the rollout actor's process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import ray
import structlog

from miles_async.arguments import Arguments
from miles_async.arguments.cluster import Device
from miles_async.arguments.debug import file_of_step
from miles_async.arguments.model_files import read_config
from miles_async.arguments.server_groups import context_lengths, of_role, server_groups, teacher_group
from miles_async.engines.scoring import EngineScorer
from miles_async.engines.stack import EngineStack
from miles_async.ledger.schedule import ScheduleWriter
from miles_async.ledger.writer import LedgerWriter
from miles_async.observability.logs import configure_logging
from miles_async.prompts.source import FilePromptSource
from miles_async.rewards.judge import API_KEY as JUDGE_KEY_VARIABLE
from miles_async.rollout.actor import RolloutParts
from miles_async.rollout.concurrency import Concurrency
from miles_async.rollout.dispatcher import Dispatcher, Hooks
from miles_async.rollout.dumps import RolloutDump, write_dump
from miles_async.rollout.generate import sampling_parameters
from miles_async.rollout.group_filters import group_filter
from miles_async.rollout.manager import RolloutManager
from miles_async.rollout.teacher import Teacher
from miles_async.runtime.environment import SecretEnvironment, apply_secrets
from miles_async.runtime.files.run_directory import LEDGER_FILE, SCHEDULE_FILE
from miles_async.runtime.network.addresses import LOOPBACK, Network
from miles_async.runtime.network.keys import API_KEY_VARIABLE, RunKeys
from miles_async.runtime.network.open_files import allow_open_files
from miles_async.runtime.network.proxies import without_proxies_for
from miles_async.runtime.picture_processor import load_picture_processor
from miles_async.runtime.services import Services
from miles_async.samples.recorder import sample_recorder
from miles_async.staleness.pool import Pool
from miles_async.staleness.versions import OldestVersions
from miles_async.weights.verify import canary_tokens
from miles_async.wiring.decisions import make_batches, make_pool, quadratic_work_of
from miles_async.wiring.engines import ForkedEngines, RunEngines, StackMaker
from miles_async.wiring.generation import Episodes, RunReward, run_services, run_template
from miles_async.wiring.held_out import RunRewards, make_evaluator
from miles_async.wiring.placement import RunPlacement
from miles_async.wiring.run_prompts import open_source, prompt_notes

log = structlog.get_logger(__name__)

AGENT_KEY_VARIABLE = "OPENAI_API_KEY"  # where clients of chat completions look


async def build_rollout(
    arguments: Arguments,
    run_dir: Path,
    device: Device,
    keys: RunKeys,
    secrets: SecretEnvironment,
    forked: ForkedEngines,
    marks: Mapping[str, Path],
    placement: RunPlacement,
) -> RolloutParts:
    """Start engines and router, build the manager. Returns the actor's parts by name. ``marks``: of the directories
    that engines share.
    """
    configure_logging(run_dir, arguments.observability.log_level, name="rollout", console=False)
    allow_open_files()  # one per request in flight; the router inherits the limit
    _set_environment(arguments, run_dir, keys, secrets)
    template = run_template(arguments)
    ledger = LedgerWriter(run_dir / LEDGER_FILE)
    source = open_source(arguments, template, began=ledger.note)
    ledger.note(source.opened)
    for note in prompt_notes(arguments, source, template):
        log.warning("prompts and turns", note=note)
    services = run_services(arguments)
    rewards = RunRewards(arguments, services)
    engines = RunEngines(
        StackMaker(
            arguments=arguments,
            run_dir=run_dir,
            device=device,
            keys=keys.engines,
            forked=forked,
            marks=marks,
            placement=placement,
        )
    )
    oldest = _oldest_versions(arguments, engines.train)
    episodes = Episodes(arguments, engines.train.client, template, run_dir, services, oldest.note, keys.sessions)
    for service in episodes.services:
        engines.add(service)
    schedule = ScheduleWriter(run_dir / SCHEDULE_FILE) if arguments.observability.record else None
    samples = sample_recorder(arguments.observability, template.decode_all, only_file=arguments.evaluation.eval_only)
    pool = make_pool(
        arguments.rollout,
        arguments.staleness,
        group_filter=arguments.rewards.group_filter,
        observers=[ledger.note, source.note, *([samples.note] if samples else [])],
        record=schedule.pool if schedule else None,
    )
    manager = RolloutManager(
        engines=engines,
        source=source,
        dispatcher=_dispatcher(arguments, engines, source, episodes, rewards.training, run_dir, pool, services, oldest),
        batches=make_batches(
            arguments,
            quadratic_work=quadratic_work_of(arguments),
            record=schedule.batch if schedule else None,
            viewer=samples,
        ),
        evaluator=make_evaluator(arguments, engines, template, episodes, rewards, services, samples),
        close_reward=rewards.close,
        put=ray.put,
        writers=(ledger, schedule) if schedule else (ledger,),
        canary=run_canary(source, arguments.model.directory, canary_length(arguments)),
        dump=_dump(arguments),
        samples=samples,
    )
    await engines.start()  # last: until here there is nothing to clean up
    evaluation = engines.evaluation
    return RolloutParts(
        manager=manager, fleet=engines.train.fleet, evaluation_fleet=evaluation.fleet if evaluation else None
    )


def _set_environment(arguments: Arguments, run_dir: Path, keys: RunKeys, secrets: SecretEnvironment) -> None:
    """Set the environment of agents and hooks, which run in this process and are clients of the run."""
    # Their clients heed proxies: for the outside, not for sessions and routers.
    os.environ.update(without_proxies_for(_own_hosts(arguments), os.environ))
    apply_secrets(secrets)
    os.environ.update(hook_keys(arguments, keys))
    network = Network.of_run(arguments.cluster)
    if network.tls is not None:
        network.tls.check(network.entrance())
        os.environ.update(network.tls.trusted(run_dir))


def _dump(arguments: Arguments) -> Callable[[RolloutDump], None] | None:
    template = arguments.debug.save_debug_rollout_data
    if template is None:
        return None
    return lambda dump: write_dump(file_of_step(template, dump.rollout_id), dump)


def _own_hosts(arguments: Arguments) -> list[str]:
    """Names and addresses of this node and of all nodes of the cluster."""
    nodes = [] if arguments.cluster.ray_address is None else [node["NodeManagerAddress"] for node in ray.nodes()]
    return [Network.of_run(arguments.cluster).entrance(), *nodes]


def run_canary(source: FilePromptSource, hf_checkpoint: Path, max_tokens: int) -> tuple[int, ...]:
    """Token ids of the text that engines and trainer score at every publication: the first prompts of the run, without
    their images.

    At most ``max_tokens``, and half of the model's context: engines keep some of it for themselves.
    """
    config = read_config(hf_checkpoint)
    context = int(config.get("max_position_embeddings", 2 * max_tokens))
    length = min(context // 2, max_tokens)
    processor = load_picture_processor(hf_checkpoint)
    left_out = frozenset[int]() if processor is None else processor.placeholders
    texts = ([token for token in tokens if token not in left_out] for tokens in source.texts())
    return canary_tokens(texts, int(config["vocab_size"]), length=length)


def canary_length(arguments: Arguments) -> int:
    """``--canary-length``, if the trainer's micro-batches and the context that flags leave engines take as many."""
    contexts = [length // 2 for length in context_lengths(arguments)]
    return min([arguments.weights.canary_length, arguments.micro_batch_tokens, *contexts])


def hook_keys(arguments: Arguments, keys: RunKeys, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables with keys for hooks: the frozen engines' for rewards, the sessions' for agents."""
    found = {API_KEY_VARIABLE: keys.engines.api.reveal()}
    if arguments.sessions.agent_path is not None:
        found[AGENT_KEY_VARIABLE] = keys.sessions.agents.reveal()
        if AGENT_KEY_VARIABLE in environment:
            log.warning(f"{AGENT_KEY_VARIABLE} is replaced by the key of this run's sessions; use another for yours")
    if _is_frozen_group(arguments, arguments.rewards.judge_url):
        found[JUDGE_KEY_VARIABLE] = keys.engines.api.reveal()
    return found


def _is_frozen_group(arguments: Arguments, url: str | None) -> bool:
    """True if frozen engines of this run serve ``url``."""
    if url is None:
        return False
    ports = [group.port for group in of_role(server_groups(arguments), "frozen") if group.port is not None]
    here = {"localhost", LOOPBACK, Network.of_run(arguments.cluster).entrance()}
    asked = urlsplit(url)
    return asked.hostname in here and asked.port in ports


def _oldest_versions(arguments: Arguments, engines: EngineStack) -> OldestVersions:
    """A request in flight shows the version its sample begins with only if the sample is that request's answer."""
    single_turn = arguments.rollout.custom_generate_function_path is None and not arguments.sessions.is_multi_turn
    return OldestVersions(engines.traffic.dispatched) if single_turn else OldestVersions()


def _dispatcher(
    arguments: Arguments,
    engines: RunEngines,
    source: FilePromptSource,
    episodes: Episodes,
    reward: RunReward,
    run_dir: Path,
    pool: Pool,
    services: Services,
    oldest_versions: OldestVersions,
) -> Dispatcher:
    rollout, staleness = arguments.rollout, arguments.staleness
    return Dispatcher(
        pool=pool,
        source=source,
        client=engines.train.client,
        hooks=Hooks(
            generate=episodes.generate(sampling_parameters(rollout), trained=True),
            reward=reward.single,
            group_reward=episodes.group_reward(reward),
            group_filter=group_filter(arguments.rewards),
            service=episodes.circuit,
            teach=_teacher(arguments, engines, services),
        ),
        arguments=rollout,
        concurrency=Concurrency(engines.train.loads, rollout),
        visible_version=lambda: engines.train.registry.version,
        stall_timeout=arguments.observability.stall_timeout,
        services=services,
        min_samples=staleness.min_samples(rollout.n_samples_per_prompt),
        oldest_versions=oldest_versions,
        dead_letters=run_dir / "dead_letters.jsonl",
    )


def _teacher(arguments: Arguments, engines: RunEngines, services: Services) -> Teacher | None:
    """The teacher of --use-opd: engines of a frozen group. Raises ConfigurationError if no group is one."""
    if not arguments.algorithm.use_opd:
        return None
    group = teacher_group(arguments)
    stack = engines.frozen[group.name]
    score = EngineScorer(
        stack.server,
        stack.registry,
        timeout=arguments.rewards.reward_timeout,
        at_once=arguments.rollout.rollout_concurrency_per_engine * group.num_engines,
    )
    return Teacher(score, services.circuit(f"the teacher, [groups.{group.name}]"))
