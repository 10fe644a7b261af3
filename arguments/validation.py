"""Checks of flags together: combinations that cannot work are refused before anything starts (C3, C12).

All problems are reported at once, each naming the flags and what to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from miles_async.arguments import Arguments
from miles_async.arguments.adapters import check_adapters
from miles_async.arguments.algorithm_checks import check_algorithm, check_critic, check_off_policy_correction
from miles_async.arguments.cluster_checks import (
    check_colocation,
    check_engine_sizes,
    check_network,
    check_ports,
    check_ranks,
)
from miles_async.arguments.debug_checks import check_debug, check_profiling
from miles_async.arguments.distillation_checks import check_distillation
from miles_async.arguments.evaluation_alone import check_evaluation_alone
from miles_async.arguments.evaluation_sets import readable_sets
from miles_async.arguments.foreign.checks import check_foreign
from miles_async.arguments.foreign.translate import Given
from miles_async.arguments.megatron_settings import check_megatron_fields
from miles_async.arguments.needs import check_needs
from miles_async.arguments.problems import given, refuse
from miles_async.arguments.prompt_files import EXPECTED
from miles_async.arguments.reward_checks import check_group_filters, check_rewards
from miles_async.arguments.routing import check_routing_replay
from miles_async.arguments.server_groups import check_server_groups
from miles_async.arguments.session_checks import check_trajectories
from miles_async.arguments.sessions import AUTO, TOOL_CALL_PARSERS
from miles_async.arguments.specification import MODULE_ATTR, flag_specifications
from miles_async.arguments.staleness_checks import check_batch_order, check_staleness
from miles_async.arguments.surroundings import (
    check_data_sets,
    check_machine,
    check_model,
    check_model_fits,
    check_outputs,
    check_pass_rates,
    check_prompt_files,
    check_router_port,
)
from miles_async.arguments.trainer_checks import (
    check_ahead_layers,
    check_bad_steps,
    check_batches,
    check_recomputation,
    check_shared_prefixes,
    check_supervised,
)
from miles_async.arguments.words import did_you_mean

Check = Callable[[Arguments], Iterator[str]]


def validate(arguments: Arguments, given: Mapping[str, Given] = MappingProxyType({})) -> None:
    """Raises ConfigurationError listing every problem found. Imports nothing heavy, starts nothing.

    ``given``: flags of other systems that have to agree with the arguments and the model.
    """
    problems = list(range_problems(arguments))
    checks = _checks(arguments, divide=not problems)
    problems += [problem for check in checks for problem in check(arguments)]
    problems += check_foreign(arguments, given)
    problems += check_needs(arguments, problems)
    refuse(problems)


def range_problems(arguments: Arguments) -> Iterator[str]:
    """Yield one line per flag whose value cannot work with any other flags."""
    for flag in flag_specifications().values():
        value = flag.value_in(arguments)
        if value is not None and (expected := flag.expected_instead(value)):
            yield f"{flag.flag}: expected {expected}, found {value}"
    if 0 < arguments.rollout.rollout_temperature < GREEDY_BELOW:
        temperature = arguments.rollout.rollout_temperature
        yield (
            f"--rollout-temperature: expected at least {GREEDY_BELOW:g}, below which engines are greedy, found "
            f"{temperature}"
        )
    if "" in arguments.rollout.rollout_stop:  # every response has it
        yield f"--rollout-stop: expected texts that are not empty, found {arguments.rollout.rollout_stop}"
    if not ((top_k := arguments.evaluation.eval_top_k) == -1 or top_k >= 1):
        yield f"--eval-top-k: expected -1 (all tokens) or at least 1, found {top_k}"


def flag_problems(arguments: Arguments) -> list[str]:
    """Problems that flags have by themselves, on any machine: files, directories and ports are not looked at."""
    problems = list(range_problems(arguments))
    for check in _checks(arguments, divide=not problems):
        if check not in SURROUNDING_CHECKS:
            problems += check(arguments)
    return [*problems, *check_needs(arguments, problems)]


def _checks(arguments: Arguments, *, divide: bool) -> tuple[Check, ...]:
    if arguments.evaluation.eval_only:
        return (*COMMON_CHECKS, *EVALUATED_CHECKS, *((check_server_groups, check_engine_sizes) if divide else ()))
    own = SUPERVISED_CHECKS if arguments.algorithm.supervised else SAMPLED_CHECKS
    return (*COMMON_CHECKS, *own, *(DIVIDING_CHECKS if divide else ()))


def check_required(arguments: Arguments) -> Iterator[str]:
    """Check that flags without a default are given."""
    if arguments.model.hf_checkpoint is None:
        yield "--hf-checkpoint is required: a Hugging Face directory with the initial weights"
    if arguments.data.prompt_data is None and arguments.sessions.environment is None:
        yield f"--prompt-data is required, the prompts: {EXPECTED}"


def check_counts(arguments: Arguments) -> Iterator[str]:
    """Check that steps are given as a number, or as epochs or a share, from which ``runs.counts`` makes one."""
    for names in SHARES.items():
        share, count = (flag_specifications()[name] for name in names)
        asked, number = share.value_in(arguments), count.value_in(arguments)
        if asked is not None and number != count.default:
            yield f"{share.flag} {asked} with {count.flag} {number}: both say the same thing; leave one out"
    if (epochs := arguments.rollout.num_epoch) is not None and arguments.data.prompt_data_weights:
        yield f"--num-epoch {epochs} with --prompt-data-weights, which draw rows without epochs: give --num-rollout"


def check_sampling(arguments: Arguments) -> Iterator[str]:
    """Check that training samples from the distribution whose log-probs engines report (C12)."""
    rollout = arguments.rollout
    cuts = {
        f"--rollout-top-p {rollout.rollout_top_p:g}": rollout.rollout_top_p != 1,
        f"--rollout-top-k {rollout.rollout_top_k}": rollout.rollout_top_k != -1,
    }
    if cutting := given(cuts):
        yield (
            f"{' and '.join(cutting)}: SGLang samples from what is left of the distribution and reports log-probs as "
            "they were before it was cut. The trainer's belong to the whole distribution, too, so no ratio or "
            "importance weight would be about the policy that sampled. Leave --rollout-top-p at 1 and --rollout-top-k "
            "at -1 (--rollout-temperature is accounted for; evaluation has --eval-top-p and --eval-top-k)"
        )


def check_hooks(arguments: Arguments) -> Iterator[str]:
    """Check that hooks are written ``module:attr``; they are loaded later, once."""
    hooks = {
        "--custom-generate-function-path": arguments.rollout.custom_generate_function_path,
        "--custom-rm-path": arguments.rewards.custom_rm_path,
        "--group-rm-path": arguments.rewards.group_rm_path,
        "--group-filter-path": arguments.rewards.group_filter_path,
        "--environment-path": arguments.sessions.environment_path,
        "--agent-path": arguments.sessions.agent_path,
    }
    if arguments.sessions.tool_call_parser not in (AUTO, *TOOL_CALL_PARSERS):
        hooks["--tool-call-parser"] = arguments.sessions.tool_call_parser
    for flag, path in hooks.items():
        if path is not None and not re.fullmatch(MODULE_ATTR, path):
            named = f"one of {', '.join((AUTO, *TOOL_CALL_PARSERS))}, or " if flag == "--tool-call-parser" else ""
            hint = did_you_mean(path, TOOL_CALL_PARSERS) if flag == "--tool-call-parser" else ""
            yield f"{flag} {path}: expected {named}module:attr, such as my_package.my_module:my_function{hint}"


def check_evaluation(arguments: Arguments) -> Iterator[str]:
    """Check that several evaluation samples of a prompt can differ."""
    evaluation = arguments.evaluation
    greedy = "which is greedy: all of them would be equal; raise the temperature, or take 1"
    if evaluation.n_samples_per_eval_prompt > 1 and evaluation.eval_temperature == 0:
        yield f"--n-samples-per-eval-prompt {evaluation.n_samples_per_eval_prompt} with --eval-temperature 0, {greedy}"
        return
    for held_out in readable_sets(evaluation):
        samples = held_out.samples(evaluation)
        if samples > 1 and held_out.temperature_in_force(evaluation, arguments.rollout) == 0:
            where = f"--eval-config {evaluation.eval_config}: {held_out.name}"
            yield f"{where}: n_samples_per_eval_prompt {samples} with temperature 0, {greedy}"


def check_deadlines(arguments: Arguments) -> Iterator[str]:
    """Check that the watchdog is slower than everything it watches: otherwise it ends healthy runs (C3, C10)."""
    limit = arguments.observability.stall_timeout
    watched = {
        "--request-timeout": arguments.engines.request_timeout,
        "--reward-timeout": arguments.rewards.reward_timeout,
        "--publication-timeout": arguments.weights.publication_timeout,
    }
    if arguments.sessions.runs_agent:
        watched["--agent-timeout"] = arguments.sessions.agent_timeout
    if arguments.sessions.plays_episodes:
        watched["--environment-timeout"] = arguments.sessions.environment_timeout
    for flag, seconds in watched.items():
        if limit < seconds:
            yield (
                f"--stall-timeout {limit:g} is shorter than {flag} {seconds:g}: a run that only waits for one slow "
                "answer would be stopped as stalled; raise the first or lower the second"
            )


def check_weights(arguments: Arguments) -> Iterator[str]:
    """Check flags about publications that depend on each other."""
    weights = arguments.weights
    if weights.verify_weights_skip and not weights.compares_digests:
        yield f"--verify-weights-skip has no effect with --verify-weights {weights.verify_weights}"
    if weights.publish_order == "rolling" and weights.pause_generation_mode == "in_place":
        yield (
            "--publish-order rolling needs engines to flush their caches, since requests of two versions share their "
            "keys meanwhile: --pause-generation-mode retract or abort, not in_place"
        )


SHARES = {
    "num_epoch": "num_rollout",
    "lr_warmup_fraction": "lr_warmup_iters",
    "critic_lr_warmup_fraction": "critic_lr_warmup_iters",
}
"""Field with a share, or with epochs → the field with the number that it becomes."""

GREEDY_BELOW = 1e-6  # SGLang (0.5) samples greedily below this temperature, and reports log-probs at temperature 1

COMMON_CHECKS: tuple[Check, ...] = (
    check_required,
    check_counts,
    check_model,
    check_recomputation,
    check_adapters,
    check_shared_prefixes,
    check_ahead_layers,
    check_megatron_fields,
    check_data_sets,
    check_prompt_files,
    check_pass_rates,
    check_bad_steps,
    check_outputs,
    check_machine,
    check_network,
    check_profiling,
)
"""Checks of every run: of the model, its layout, and what both kinds of data have."""

GENERATED_CHECKS: tuple[Check, ...] = (
    check_rewards,
    check_evaluation,
    check_hooks,
    check_trajectories,
    check_deadlines,
    check_router_port,
)
"""Checks of flags for what engines generate, trained on or not."""

SAMPLED_CHECKS: tuple[Check, ...] = (
    check_algorithm,
    check_critic,
    check_sampling,
    check_staleness,
    check_batch_order,
    check_off_policy_correction,
    check_distillation,
    check_routing_replay,
    *GENERATED_CHECKS,
    check_group_filters,
    check_weights,
    check_colocation,
    check_debug,
)
"""Checks of flags for sampled data."""

EVALUATED_CHECKS: tuple[Check, ...] = (check_evaluation_alone, *GENERATED_CHECKS)
"""Checks of ``--eval-only``, where nothing is trained."""

SUPERVISED_CHECKS: tuple[Check, ...] = (check_supervised,)
"""Checks of ``--loss-type sft_loss``, which refuses flags for sampled data."""

DIVIDING_CHECKS: tuple[Check, ...] = (
    check_model_fits,
    check_ranks,
    check_engine_sizes,
    check_batches,
    check_server_groups,
    check_ports,
)
"""They divide by sizes, so they wait until every size is at least 1."""

SURROUNDING_CHECKS: tuple[Check, ...] = (
    check_model,
    check_prompt_files,
    check_pass_rates,
    check_outputs,
    check_machine,
    check_router_port,
)
"""Checks that look at the machine; the others read at most config.json, and do without where it is missing."""
