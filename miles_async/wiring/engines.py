"""The processes of the rollout side: engines by group, their routers, the session server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from miles_async.arguments import Arguments
from miles_async.arguments.cluster import Device
from miles_async.arguments.evaluation_sets import evaluation_sets
from miles_async.arguments.model_files import read_config
from miles_async.arguments.prompt_limit import response_length
from miles_async.arguments.routing import router_shape
from miles_async.arguments.server_groups import ServerGroup, of_role, server_groups
from miles_async.engines.external import ExternalServers
from miles_async.engines.kind import LaunchServer, ServerSpec
from miles_async.engines.placement import RayServers
from miles_async.engines.reports import EngineReports
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.stack import EngineStack, FrozenEngines
from miles_async.engines.supervisor import EngineGroup
from miles_async.errors import ConfigurationError
from miles_async.runtime.cluster.node_files import NodeFiles
from miles_async.runtime.environment import secret_environment
from miles_async.runtime.files.run_directory import ENGINES_FILE
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.network.keys import EngineKeys
from miles_async.runtime.tasks import gathered, quietly
from miles_async.single_side import CHECKPOINT_VERSION
from miles_async.types import EngineStats, JsonObject
from miles_async.weights import fp8
from miles_async.wiring.placement import RunPlacement

KIND = SGLANG
"""The inference server of runs."""

SEEDS_PER_GROUP = 10_000  # engine i of a group samples with the i-th


class Service(Protocol):
    async def start(self) -> None: ...

    async def supervise(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedEngines:
    """Fork servers for the processes of engines, where this node has them."""

    servers: Path | None = None  # socket of the fork server of inference servers
    interpreter: str | None = None  # of the Ray actors that supervise them


class RunEngines:
    """The engines of a run and its other services, as the manager's ``Engines``."""

    def __init__(self, make: StackMaker) -> None:
        """Start nothing yet. Raises ConfigurationError for a file of groups that cannot be used."""
        groups, engines = server_groups(make.arguments), make.arguments.engines
        evaluation = of_role(groups, "evaluation")
        self.train = make(EngineStack, "router", of_role(groups, "train"), engines.sglang_router_port)
        self.evaluation = make(EngineStack, "router-evaluation", evaluation) if evaluation else None
        self.frozen = {
            group.name: make(FrozenEngines, f"router-{group.name}", [group], group.port)
            for group in of_role(groups, "frozen")
        }
        stacks = [(self.train, "train")]
        stacks += [(self.evaluation, "evaluation")] if self.evaluation else []
        stacks += [(stack, "frozen") for stack in self.frozen.values()]
        self._stacks = [stack for stack, _ in stacks]
        self._services: list[Service] = [*self._stacks]
        self._colocated = make.arguments.cluster.colocate
        self._reports = EngineReports([(stack.loads, role) for stack, role in stacks], make.run_dir / ENGINES_FILE)
        self.wait_for_joining = self.train.supervisor.wait_for_joining

    def add(self, service: Service) -> None:
        self._services.append(service)

    async def start(self) -> None:
        """Start everything. On an error, stop everything and raise it."""
        try:
            await gathered(*(service.start() for service in self._services))
        except BaseException:
            await quietly(self.stop())
            raise

    async def supervise(self) -> None:
        """Supervise everything until cancelled; raise the first error."""
        await gathered(self._reports.run(), *(service.supervise() for service in self._services))

    async def stop(self) -> None:
        """End all processes, even if stopping one fails."""
        stopping = (service.stop() for service in reversed(self._services))
        for result in await asyncio.gather(*stopping, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def stats(self) -> EngineStats:
        """Statistics of the engines that generate for training; ``engines`` describes all."""
        described = "; ".join(stack.registry.describe() for stack in self._stacks)
        return msgspec.structs.replace(self.train.stats(), engines=described)

    async def scale(self, group: str, engines: int) -> None:
        """See ``EngineSupervisor.scale``. Raises ConfigurationError, also for external engines and --colocate."""
        for stack in self._stacks:
            if group in stack.supervisor.groups:
                if stack is self.train and self._colocated:
                    raise ConfigurationError(
                        f"group {group} takes turns with the trainer on its GPUs (--colocate), so it keeps its size"
                    )
                if isinstance(stack.supervisor.groups[group].launch, ExternalServers):
                    raise ConfigurationError(
                        f"group {group} has external engines: this run neither starts nor ends them"
                    )
                await stack.supervisor.scale(group, engines)
                return
        names = [name for stack in self._stacks for name in stack.supervisor.groups]
        raise ConfigurationError(f"there is no group {group}; there are {', '.join(names)}")


@dataclass(kw_only=True, slots=True)
class StackMaker:
    """Makes stacks with the settings that a run's stacks share."""

    arguments: Arguments
    run_dir: Path
    device: Device
    keys: EngineKeys
    forked: ForkedEngines
    marks: Mapping[str, Path]  # of the directories that engines share
    placement: RunPlacement
    _groups: int = 0  # groups with separate seeds, so far

    def __call__(
        self, kind: type[EngineStack], name: str, groups: Sequence[ServerGroup], port: int | None = None
    ) -> EngineStack:
        arguments, trained = self.arguments, bool(of_role(groups, "train"))
        model = read_config(arguments.model.directory) if trained else {}
        replayed = trained and arguments.algorithm.routing_replay == "rollout"
        return kind(
            [self._group(group) for group in groups],
            arguments.engines,
            arguments.weights,
            log_dir=self.run_dir / "logs",
            network=Network.of_run(arguments.cluster),
            calls=KIND.calls,
            name=name,
            port=port,
            keys=self.keys,
            routers=router_shape(model) if replayed else None,  # the trainer replays the engines' choices
            vocabulary=model.get("vocab_size"),
            needed=not of_role(groups, "evaluation"),  # A9
        )

    def _group(self, group: ServerGroup) -> EngineGroup:
        launch: LaunchServer
        if group.external:
            start_timeout = self.arguments.engines.engine_start_timeout
            network = Network.of_run(self.arguments.cluster)
            launch = ExternalServers(group.external, start_timeout, KIND.calls, self.keys, network)
        else:
            spec = server_spec(self.arguments, group, self.run_dir / "logs", self.device)
            spec = msgspec.structs.replace(
                spec,
                random_seed=self.arguments.data.rollout_seed + self._groups * SEEDS_PER_GROUP,
                keys=self.keys,
                secrets=secret_environment(self.arguments.cluster.forward_env),
                fork_server=self.forked.servers,
                files=self._files(spec),
            )
            labels = self.arguments.cluster.rollout_labels
            places = self.placement.engines.get(group.name, ())
            launch = RayServers(KIND, spec, labels, self.forked.interpreter, places)
            self._groups += 1
        return EngineGroup(
            name=group.name,
            engines=group.num_engines,
            ranks=group.gpus_per_engine,
            streams=KIND.streams and not group.external,
            launch=launch,
        )

    def _files(self, spec: ServerSpec) -> NodeFiles:
        """A model that is a directory, since servers take one that is absent for a name on a hub."""
        model = Path(spec.model_path)
        return NodeFiles(
            present={"--hf-checkpoint (or model in --server-groups)": model} if model.is_absolute() else {},
            shared=self.marks,
            otherwise="use --weight-transport object_store",
        )


def server_spec(arguments: Arguments, group: ServerGroup, log_dir: Path, device: Device) -> ServerSpec:
    alone = arguments.sides == "rollout"
    published = group.role != "frozen" and not alone
    return ServerSpec(
        group=group.name,
        model_path=group.model or str(arguments.model.hf_checkpoint),
        trust_remote_code=arguments.model.trust_remote_code and group.model is None,
        device=device,
        dtype="bfloat16" if arguments.model.bf16 else "float32",
        tensor_parallel_size=group.gpus_per_engine,
        nodes=group.nodes_per_engine,
        random_seed=arguments.data.rollout_seed,
        start_timeout=arguments.engines.engine_start_timeout,
        network=Network.of_run(arguments.cluster),
        log_dir=str(log_dir),
        longest_sample=longest_sample(arguments),
        concurrency=arguments.rollout.rollout_concurrency_per_engine,
        engines_on_host=sum(each.num_engines for each in server_groups(arguments) if not each.external),
        held_weights=published and arguments.weights.compares_digests,
        model_overrides=_form_of_weights(arguments) if published else {},
        dummy_weights=published,
        weight_version=CHECKPOINT_VERSION if alone else None,
        grammars=arguments.sessions.runs_agent,
        routed_experts=group.role == "train" and arguments.algorithm.routing_replay == "rollout",
        weight_group_seconds=arguments.weights.group_timeout,
        publication_seconds=arguments.weights.publication_timeout if published else 0.0,
        extra=group.all_extra(arguments),
    )


def _form_of_weights(arguments: Arguments) -> JsonObject:
    """Fields of config.json by which engines expect weights as they are published."""
    if arguments.weights.rollout_quantization == "fp8":
        return {"quantization_config": fp8.CONFIG}
    model = arguments.model.hf_checkpoint
    return {"quantization_config": None} if model and "quantization_config" in read_config(model) else {}


def longest_sample(arguments: Arguments) -> int:
    """Tokens of the longest prompt with its response, in training or evaluation."""
    prompt, held_out = arguments.data.rollout_max_prompt_len, evaluation_sets(arguments.evaluation)
    response = max(response_length(arguments, which)[1] for which in (None, *held_out))
    if prompt is None or arguments.sessions.is_multi_turn:
        packed = arguments.micro_batch_tokens
        return packed if response < packed else packed + response
    prompt = max(prompt, *(each.max_prompt_len or 0 for each in held_out)) if held_out else prompt
    return prompt + response
