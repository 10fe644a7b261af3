"""What the rollout actor is made of: the half of the composition root that runs in the actor's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from arguments import Arguments
from miles_async.engines.placement import RayServers
from miles_async.engines.server import ServerSpec
from miles_async.engines.stack import EngineStack
from miles_async.evaluation.evaluator import Evaluator
from miles_async.hooks import load_object
from miles_async.observability.logs import configure_logging
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.templates import ChatTemplate, load_tokenizer
from miles_async.protocols import Generate, GroupFilter, Reward
from miles_async.rewards.hub import resolve_reward
from miles_async.rollout.batches import BatchMaker
from miles_async.rollout.concurrency import Concurrency
from miles_async.rollout.dispatcher import Dispatcher, Hooks
from miles_async.rollout.generate import SingleTurnGenerate, sampling_parameters
from miles_async.rollout.ledger_writer import LedgerWriter
from miles_async.rollout.manager import RolloutManager
from miles_async.run_directory import LEDGER_FILE
from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.staleness.versions import parse_spans


async def build_rollout(arguments: Arguments, run_dir: Path, device: str) -> Mapping[str, Any]:
    """Start engines and router, build the manager. Returns the actor's parts: "manager" and "fleet"."""
    configure_logging(run_dir, arguments.observability.log_level, name="rollout", console=False)
    template = _template(arguments)
    source = FilePromptSource(arguments.data, template.encode)
    reward = resolve_reward(arguments.rollout)
    spec = server_spec(arguments, run_dir, device)
    engines = EngineStack(
        spec,
        arguments.engines,
        num_engines=arguments.cluster.num_engines,
        launch=RayServers(spec),
        parse_versions=parse_spans,
        publication_timeout=arguments.weights.publication_timeout,
    )
    ledger = LedgerWriter(run_dir / LEDGER_FILE)
    manager = RolloutManager(
        engines=engines,
        source=source,
        dispatcher=_dispatcher(arguments, engines, source, template, reward, run_dir, ledger),
        batches=BatchMaker(
            algorithm=arguments.algorithm,
            dp_size=arguments.data_parallel_size,
            max_tokens=arguments.optimizer.max_tokens_per_gpu,
            samples_per_optimizer_step=arguments.global_batch_size,
            bound=arguments.staleness.bound,
        ),
        evaluator=_evaluator(arguments, engines, template, reward),
        put=ray.put,
        ledger=ledger,
    )
    await engines.start()  # last: until here there is nothing to clean up
    return {"manager": manager, "fleet": engines.fleet}


def server_spec(arguments: Arguments, run_dir: Path, device: str) -> ServerSpec:
    """What every SGLang server of the run is started with."""
    return ServerSpec(
        model_path=str(arguments.model.hf_checkpoint),
        device=device,
        dtype="bfloat16" if arguments.model.bf16 else "float32",
        tensor_parallel_size=arguments.cluster.rollout_num_gpus_per_engine,
        random_seed=arguments.data.rollout_seed,
        start_timeout=arguments.engines.engine_start_timeout,
        single_node=arguments.cluster.ray_address is None,
        log_dir=str(run_dir / "logs"),
        sglang_extra=arguments.engines.sglang_extra,
    )


def _template(arguments: Arguments) -> ChatTemplate:
    assert arguments.model.hf_checkpoint is not None
    return ChatTemplate(load_tokenizer(arguments.model.hf_checkpoint), arguments.data.apply_chat_template)


def _dispatcher(
    arguments: Arguments,
    engines: EngineStack,
    source: FilePromptSource,
    template: ChatTemplate,
    reward: Reward,
    run_dir: Path,
    ledger: LedgerWriter,
) -> Dispatcher:
    rollout, staleness = arguments.rollout, arguments.staleness
    return Dispatcher(
        pool=Pool(
            StalenessPolicy.from_arguments(staleness, rollout),
            RetryPolicy(
                max_prompt_attempts=rollout.max_prompt_attempts,
                max_quarantined_prompts=rollout.max_quarantined_prompts,
                recycle_stale=staleness.stale_group_action == "recycle",
            ),
            total_groups=rollout.num_rollout * rollout.rollout_batch_size,
            observer=ledger,
        ),
        source=source,
        client=engines.client,
        hooks=Hooks(
            generate=_custom_generate(arguments) or SingleTurnGenerate(sampling_parameters(rollout), template.decode),
            reward=reward,
            group_filter=load_object(rollout.group_filter_path, GroupFilter, "--group-filter-path")
            if rollout.group_filter_path
            else None,
        ),
        arguments=rollout,
        concurrency=Concurrency(engines.loads, rollout),
        visible_version=lambda: engines.registry.version,
        stall_timeout=arguments.observability.stall_timeout,
        min_samples=staleness.min_samples(rollout.n_samples_per_prompt),
        dead_letters=run_dir / "dead_letters.jsonl",
    )


def _custom_generate(arguments: Arguments) -> Generate | None:
    path = arguments.rollout.custom_generate_function_path
    return load_object(path, Generate, "--custom-generate-function-path") if path else None


def _evaluator(arguments: Arguments, engines: EngineStack, template: ChatTemplate, reward: Reward) -> Evaluator | None:
    evaluation = arguments.evaluation
    if evaluation.eval_prompt_data is None:
        return None
    data = replace(arguments.data, prompt_data=evaluation.eval_prompt_data)
    sampling = sampling_parameters(arguments.rollout) | {
        "temperature": evaluation.eval_temperature,
        "max_new_tokens": evaluation.eval_max_response_len or arguments.rollout.rollout_max_response_len,
    }
    return Evaluator(
        FilePromptSource(data, template.encode).all_prompts(),
        engines.client,
        _custom_generate(arguments) or SingleTurnGenerate(sampling, template.decode),
        reward,
        n_samples=evaluation.n_samples_per_eval_prompt,
        concurrency=evaluation.eval_concurrency,
    )
