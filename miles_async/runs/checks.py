"""Checks before a run starts, beyond its flags: machine, model, hooks, other programs' flags.

``miles-async train`` checks all of it first, and ``--dry-run`` stops there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from miles_async.arguments import Arguments, EnginesArguments
from miles_async.arguments.algorithm_checks import check_absent_critic, check_trained_critic
from miles_async.arguments.distillation_checks import has_vocabulary, vocabulary_difference
from miles_async.arguments.megatron_settings import megatron_settings
from miles_async.arguments.model import TRANSFORMER_ENGINE_MODULES
from miles_async.arguments.model_files import language_fields
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.arguments.problems import refusal, refuse
from miles_async.arguments.server_groups import (
    attention_groups,
    given_sglang_flags,
    of_role,
    server_groups,
    sglang_number,
)
from miles_async.arguments.words import did_you_mean
from miles_async.backends import find_backend
from miles_async.backends.megatron.attention_kernels import (
    attention_problems,
    usable_backend,
)
from miles_async.backends.megatron.families import float8_files, hf_config
from miles_async.backends.megatron.families.known import FAMILIES
from miles_async.backends.megatron.families.layout import check_layout
from miles_async.checkpoints import start
from miles_async.checkpoints.manifest import SHAPING, fingerprint, least_bytes
from miles_async.engines.sglang.known_flags import refused_flags, sglang_flags, smg_flags, smg_policies, unknown_flags
from miles_async.errors import ConfigurationError
from miles_async.machine.checks import Intent, machine_findings
from miles_async.machine.finding import Finding
from miles_async.machine.network import WANDB, service_findings
from miles_async.runtime.cluster.ray_address import check_ray_address
from miles_async.runtime.cuda_environment import memory_saver_problems, nccl_problems
from miles_async.runtime.device import choose_device
from miles_async.runtime.environment import hidden_modules
from miles_async.runtime.files.run_directory import check_run_directory
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.network.open_files import connection_limits
from miles_async.runtime.packages import require
from miles_async.types import JsonObject
from miles_async.weights import fp8
from miles_async.weights.transports import choice

FORM_REFUSES = {
    "--json-model-override-args": "it is how engines are told",
    "--speculative-algorithm": "draft models would be read in that form, too",
}
"""Flags of SGLang's servers → why they do not go with weights in another form than the files'."""

LOG_IN = "run `wandb login` or set WANDB_API_KEY, or stay offline: --wandb-mode offline, or WANDB_MODE=offline"


def check_surroundings(arguments: Arguments) -> list[str]:
    """Check machine, model, checkpoints, passed-on flags, GPUs, transport and places.

    Returns notes on slower or missing parts. Raises ConfigurationError listing every problem.
    """
    findings = list(machine_state(arguments))
    checks = (
        model_problems,
        checkpoint_problems,
        passed_on_problems,
        device_problems,
        connection_problems,
        tls_problems,
        transport_problems,
        place_problems,
        tracker_problems,
    )
    problems = [finding.problem for finding in findings if finding.verdict == "failure"]
    refuse([*problems, *(problem for check in checks for problem in check(arguments))])
    return [finding.problem for finding in findings if finding.verdict == "warning"]


def machine_state(arguments: Arguments) -> Iterator[Finding]:
    """Yield the findings of ``miles-async doctor`` that matter to the run."""
    cluster, observability, save = arguments.cluster, arguments.observability, arguments.checkpoint.save
    directories = {"--run-dir": observability.run_dir} | ({"--save": save} if save is not None else {})
    alone = cluster.ray_address is None
    yield from machine_findings(
        Intent(device=cluster.device, own_gpus=alone, ports=cluster.ports, directories=directories)
    )
    yield from wandb_findings(observability)


def wandb_findings(observability: ObservabilityArguments) -> Iterator[Finding]:
    """Yield what keeps a run from wandb's server, if it is to log there. Without a key it cannot work."""
    from miles_async.observability.wandb_tracker import login_problem, wandb_mode

    try:
        if wandb_mode(observability) != "online":
            return
    except ConfigurationError as error:
        yield Finding(check="wandb", verdict="failure", found=str(error), mend="or give --wandb-mode")
        return
    if problem := login_problem():
        yield Finding(check="wandb", verdict="failure", found=problem, mend=LOG_IN)
        return
    yield from service_findings(WANDB)


def tracker_problems(arguments: Arguments) -> Iterator[str]:
    """Yield the trackers whose packages, extras of the project, are not installed, or that lack a key or an address."""
    from miles_async.observability.mlflow_tracker import tracking_uri
    from miles_async.observability.prometheus_tracker import metrics_key
    from miles_async.observability.swanlab_tracker import swanlab_mode

    for extra in ("tensorboard", "mlflow", "trackio", "swanlab"):
        if getattr(arguments.observability, f"use_{extra}"):
            yield from refusal(partial(require, extra, f"--use-{extra}"))
    if arguments.observability.use_prometheus:
        yield from refusal(metrics_key)
    if arguments.observability.use_mlflow:
        yield from refusal(lambda: tracking_uri(arguments.observability))
    if arguments.observability.use_swanlab:
        yield from refusal(lambda: swanlab_mode(arguments.observability))


def model_problems(arguments: Arguments) -> Iterator[str]:
    """Yield why the model cannot be trained or split as asked; for the backend that comes with the project."""
    model = arguments.model
    if model.train_backend != "megatron" or model.hf_checkpoint is None:
        return
    try:
        config = hf_config.read_config(model.hf_checkpoint)
        hf_config.check_model(config, model.hf_checkpoint)
        float8_files.check_files(config, model.hf_checkpoint)
        check_layout(config, model, arguments.cluster.trainer_world_size)
        if hf_config.family_of(config).images:
            yield from _image_problems(arguments, config["model_type"])
        if arguments.sides == "both":
            yield from _form_problems(arguments, language_fields(config))
        reason = hf_config.family_of(config).gpu_engines
        if reason and choose_device(arguments.cluster.device) == "cpu":
            yield f"--device cpu: engines cannot serve model_type {config['model_type']!r}: {reason}; use --device cuda"
        for flag, other in arguments.model_directories.items():
            if other != model.hf_checkpoint:
                yield from refusal(partial(_check_other, arguments, config, flag, other))
    except ConfigurationError as error:
        yield str(error)


def _form_problems(arguments: Arguments, config: JsonObject) -> Iterator[str]:
    """Yield why engines cannot have weights in the form in which they are published: in float8, or not as the files."""
    if arguments.weights.rollout_quantization == "fp8":
        for problem in _float8_problems(arguments, config):
            yield f"--rollout-quantization fp8: {problem}"
    elif config.get("quantization_config"):
        for flags, _ in _updated_engines(arguments):
            for problem in _refused(flags, FORM_REFUSES):
                yield f"--hf-checkpoint in float8, whose weights are published as floats: {problem}"


def _updated_engines(arguments: Arguments) -> Iterator[tuple[dict[str, str], int]]:
    """SGLang's flags of each group of engines that are started here and get weights, and the GPUs of one of them."""
    for group in server_groups(arguments):
        if group.role != "frozen" and not group.external:
            yield given_sglang_flags(arguments, group), group.gpus_per_engine


def _refused(flags: Mapping[str, str], reasons: Mapping[str, str]) -> Iterator[str]:
    for flag, why in reasons.items():
        if flags.get(flag, "NGRAM") != "NGRAM":  # which drafts without a model
            yield f"--sglang-{flag[2:]}: {why}; leave one of them out"


def _float8_problems(arguments: Arguments, config: JsonObject) -> Iterator[str]:
    """Yield why engines cannot hold this model in float8."""
    kind = config["model_type"]
    if not hf_config.family_of(config).float8:
        others = ", ".join(name for name, family in FAMILIES.items() if family.float8)
        yield f"model_type {kind!r} was not compared in it; leave it out, or use a model of {others}"
        return
    if not arguments.model.bf16 and choose_device(arguments.cluster.device) == "cuda":
        yield "GPUs quantize activations of bf16 only; add --bf16"
    for flags, ranks in _updated_engines(arguments):
        yield from _refused(flags, {"--quantization": "engines would quantize once more"} | FORM_REFUSES)
        whole = flags.get("--moe-a2a-backend", "none") != "none"  # which splits no expert
        dealt = sglang_number(flags, "--ep-size", "--expert-parallel-size", "--ep") or 1
        yield from fp8.shape_problems(
            config,
            attention=max(1, ranks // attention_groups(flags)),
            dense=sglang_number(flags, "--moe-dense-tp-size") or ranks,
            experts=1 if whole else max(1, ranks // dealt),
            shared_experts=1 if whole else ranks,
        )


def _check_other(arguments: Arguments, config: JsonObject, flag: str, other: Path) -> None:
    """Raise ConfigurationError if the reference, or the critic, cannot run in the policy's place."""
    model, policy = arguments.model, arguments.model.hf_checkpoint
    assert policy is not None, "compared with it"
    hf_config.check_model(found := hf_config.read_config(other), other)
    float8_files.check_files(found, other)
    if hf_config.family_of(found).images != hf_config.family_of(config).images:
        raise ConfigurationError(f"{other}: it and --hf-checkpoint should both read images, or neither")
    try:
        plain = replace(model, lora_rank=0, enable_mtp_training=False, share_prefixes=False)
        check_layout(found, plain, arguments.cluster.trainer_world_size)
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag} {other}, which is split as the policy is: {error}") from None
    if has_vocabulary(policy) and has_vocabulary(other) and (differs := vocabulary_difference(policy, other)):
        raise ConfigurationError(f"{flag}: it reads the policy's token ids, and {differs}")
    differing = [name for name in SHAPING if config.get(name) != found.get(name)]
    if flag == "--ref-hf-checkpoint" and arguments.algorithm.ref_update_interval is not None and differing:
        raise ConfigurationError(
            f"--ref-update-interval: the reference follows the policy's weights, and {other} differs from it in "
            f"{', '.join(differing)}"
        )


def _image_problems(arguments: Arguments, kind: str) -> Iterator[str]:
    """Parts of a run through which the images of its prompts don't pass."""
    debug = arguments.debug
    parts = {
        "--use-opd": arguments.algorithm.use_opd,
        "--save-debug-rollout-data": debug.save_debug_rollout_data is not None,
        "--load-debug-rollout-data": debug.load_debug_rollout_data is not None,
    }
    for flag, given in parts.items():
        if given:
            yield f"{flag}: images don't pass through it, and model_type {kind!r} reads images; leave it out"


def checkpoint_problems(arguments: Arguments) -> Iterator[str]:
    """Yield why the run cannot resume as asked, or not save where it should."""
    checkpoint, model = arguments.checkpoint, arguments.model
    if model.hf_checkpoint is None:
        return
    yield from start.checkpoint_problems(
        save=checkpoint.save,
        load=checkpoint.load,
        overwrite=checkpoint.save_overwrite,
        model=fingerprint(model, arguments.critic.critic_hf_checkpoint),
        least_bytes=least_bytes(model),
        anyway=checkpoint.load_anyway,
    )


def passed_on_problems(arguments: Arguments) -> Iterator[str]:
    """Yield flags that the installed SGLang or smg does not know, and flags of SGLang that a run refuses."""
    engines = arguments.engines
    groups = server_groups(arguments)
    if engines.sglang_extra or any(group.sglang for group in groups):
        known = sglang_flags()
        problems = [*unknown_flags(engines.sglang_extra, known, "--sglang-")]
        for group in groups:
            where = f"--server-groups {engines.server_groups}: [groups.{group.name}.sglang] "
            problems += unknown_flags(group.sglang_extra, known, where)
            shared, own = group.shared_extra(arguments), group.sglang_extra
            problems += refused_flags(shared, "--sglang-", beside=own)
            problems += refused_flags(own, where, beside=shared)
        yield from dict.fromkeys(problems)
    if engines.router_extra:
        yield from unknown_flags(engines.router_extra, smg_flags(), "--router-")
    policy = engines.sglang_router_policy
    if policy != EnginesArguments().sglang_router_policy and (policies := smg_policies()) and policy not in policies:
        hint = did_you_mean(policy, policies)
        yield f"--sglang-router-policy {policy}: expected one of {', '.join(policies)}{hint}"


def place_problems(arguments: Arguments) -> Iterator[str]:
    """Yield problems with the run directory (in use, or not a run's), the Ray cluster, this machine's network, the
    training backend and the module path.
    """
    yield from refusal(lambda: check_run_directory(arguments.observability.run_dir))
    yield from refusal(lambda: find_backend(arguments.model.train_backend))
    if arguments.cluster.ray_address is None and arguments.cluster.network_interface is not None:
        yield from refusal(Network.of_run(arguments.cluster).variables)
    yield from refusal(lambda: check_ray_address(arguments.cluster.ray_address))
    yield from hidden_modules()


def device_problems(arguments: Arguments) -> Iterator[str]:
    """Yield what needs a GPU on a CPU, what its kernels and NCCL would refuse, and whether more GPUs are needed than
    this machine has, if Ray starts on it.
    """
    from miles_async.runtime.device import count_gpus

    cluster = arguments.cluster
    device = choose_device(cluster.device)
    if device == "cpu" and cluster.colocate:
        yield "--colocate on a machine without GPUs, where sides share cores anyway: leave it out"
    if device == "cpu" and arguments.debug.record_memory_history:
        yield (
            "--record-memory-history on a machine without GPUs: PyTorch records allocations of GPU memory only; leave "
            "it out (`miles-async plan --memory` estimates a GPU's memory)"
        )
    if device == "cpu" and (fused := set(arguments.model.recompute_modules) & set(TRANSFORMER_ENGINE_MODULES)):
        yield f"--recompute-modules {' '.join(sorted(fused))}: needs Transformer Engine, which a CPU run does not have"
    if device == "cpu":
        return
    settings = megatron_settings(arguments.model.megatron_extra)
    backend = str(settings.provider.get("attention_backend", "auto"))
    yield from attention_problems(usable_backend(backend), os.environ)
    if arguments.weights.weight_transport == "distributed":
        published = (group for group in server_groups(arguments) if group.role != "frozen" and not group.external)
        flags = {word for group in published for word in group.all_extra(arguments)}
        yield from nccl_problems(flags, os.environ)
    if cluster.colocate:
        yield from memory_saver_problems(os.environ)
    if cluster.ray_address is not None:
        return
    owned = [group for group in server_groups(arguments) if not group.external]
    alone = cluster.colocate or arguments.sides == "trainer"
    generating = 0 if alone else sum(group.engines * group.gpus_per_engine for group in owned)
    training = 0 if arguments.sides == "rollout" else cluster.trainer_world_size
    needed, there = training + generating, count_gpus()
    if needed > there:
        yield (
            f"{needed} GPUs are asked for and this machine has {there}: {training} to train "
            f"(--actor-num-gpus-per-node), {generating} to generate (--rollout-num-gpus or --server-groups); ask for "
            "fewer, or join a cluster with --ray-address"
        )


def connection_problems(arguments: Arguments) -> Iterator[str]:
    """Yield limits of this machine that the requests in flight of a run exceed."""
    if arguments.sides == "trainer":
        return
    rollout, per_engine = arguments.rollout, arguments.rollout.rollout_concurrency_per_engine
    engines = sum(group.num_engines for group in of_role(server_groups(arguments), "train"))
    samples = rollout.n_samples_per_prompt + rollout.extra_samples_per_prompt
    admitted = arguments.staleness.lead * rollout.rollout_batch_size * samples
    for limit in connection_limits(min(engines * per_engine, admitted)):
        yield (
            f"--rollout-concurrency-per-engine {per_engine} on {engines} engines: up to "
            f"{min(engines * per_engine, admitted)} requests at once need {limit}; raise that limit, or lower the flag"
        )


def tls_problems(arguments: Arguments) -> Iterator[str]:
    """Yield why the run's servers could not use the certificate, or its clients would refuse it."""
    network = Network.of_run(arguments.cluster)
    if (tls := network.tls) is not None:
        # In a cluster each node checks its own address when it knows it.
        address = network.entrance() if network.single_node or network.host else None
        yield from refusal(lambda: tls.check(address))


def transport_problems(arguments: Arguments) -> Iterator[str]:
    """Yield problems of the weight transport with the device, the engines and other flags."""
    if arguments.sides == "trainer":
        return
    groups = server_groups(arguments)
    yield from choice.transport_problems(
        arguments.weights,
        choose_device(arguments.cluster.device),
        external_engines=any(group.external for group in groups),
        several_nodes=any(group.nodes_per_engine > 1 and group.role != "frozen" for group in groups),
    )


def check_hooks(arguments: Arguments) -> None:
    """Import what ``module:attr`` flags name and check it against its protocol. Raises ConfigurationError.

    The processes that call the hooks load them again; here a mistake costs no start-up.
    """
    from miles_async.algorithms import registry
    from miles_async.observability.trackers import check_tracker
    from miles_async.rollout.group_filters import group_filter
    from miles_async.wiring import generation

    check_tracker(arguments.observability)
    if arguments.algorithm.supervised:
        return  # nothing is sampled or rewarded
    generation.check_hooks(arguments)
    group_filter(arguments.rewards)
    registry.check_own(arguments.algorithm)
    if ":" in (arguments.algorithm.token_advantages or ""):
        needed = registry.own_need_critic(arguments.algorithm)
        refuse([*(check_trained_critic if needed else check_absent_critic)(arguments)])
