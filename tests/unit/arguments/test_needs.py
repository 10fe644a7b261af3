"""Flags that have no effect are refused, by what their declarations say that they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.arguments.flag import FlagValue
from miles_async.arguments.needs import check_needs, need_notes, value_notes
from miles_async.arguments.parser import assemble
from miles_async.arguments.sessions import ENVIRONMENTS
from miles_async.arguments.specification import FlagSpecification, flag_specifications
from miles_async.arguments.validation import flag_problems

# covers: C12

FINE = {
    "hf_checkpoint": Path("model"),
    "prompt_data": ("p.jsonl",),
    "rm_type": "exact_match",
    "max_weight_staleness": 2,
    "use_rollout_logprobs": True,
}
NEEDING = [flag for flag in flag_specifications().values() if flag.needs]


def problems(**values: object) -> list[str]:
    arguments = assemble(values, {})
    return [*check_needs(arguments, []), *need_notes(arguments)]


def changed(flag: FlagSpecification) -> FlagValue:
    """A value of the flag that is not its default."""
    if flag.kind is bool:
        return not flag.default
    values: dict[type, FlagValue] = {int: 7, float: 0.123, str: next(iter(set(flag.choices) - {flag.default}), "x")}
    value = values.get(flag.kind, "x")
    return (str(value),) if flag.many else value


def fulfil(need: str) -> dict[str, object]:
    """Values with which the need holds."""
    name, equals, value = need.partition("=")
    needed = flag_specifications()[name]
    if value == "own":
        return {name: "mine:Own"}
    return {name: value} if equals else {name: True if needed.kind is bool else changed(needed)}


def without(flag: FlagSpecification) -> dict[str, object]:
    """Values with which no need of the flag holds: defaults, or what is none of the values that it needs."""
    values: dict[str, object] = {}
    for name, _, wanted in (need.partition("=") for need in flag.needs):
        needed = flag_specifications()[name]
        if wanted and needed.default in (need.partition("=")[2] for need in flag.needs):
            values[name] = next(choice for choice in needed.choices if f"{name}={choice}" not in flag.needs)
        elif not wanted and (needed.default or name == "max_weight_staleness"):  # which FINE gives
            values[name] = needed.default and 0
    return values


@pytest.mark.parametrize("flag", NEEDING, ids=lambda flag: flag.name)
def test_a_flag_without_what_it_needs_is_refused_and_with_it_is_not(flag: FlagSpecification) -> None:
    given = {flag.name: changed(flag)}
    arguments = assemble(FINE | given | without(flag), {})
    (problem,) = [*flag_problems(arguments), *need_notes(arguments)]
    assert problem.startswith((flag.flag, flag.negated_flag))
    for need in flag.needs:
        others = [other for other in problems(**given, **fulfil(need)) if other.startswith(f"{flag.flag} ")]
        assert not others, need


def test_needs_name_flags_and_values_that_exist() -> None:
    for flag in NEEDING:
        for name, _, value in (need.partition("=") for need in flag.needs):
            needed = flag_specifications()[name]
            known = {"rm_type": [value], "environment": ENVIRONMENTS}.get(name, needed.choices)
            assert not value or value in known or (value == "own" and needed.or_path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"max_turns": 4, "max_tokens_per_turn": 9, "reasoning_parser": "think"},
            "--max-turns 4, --max-tokens-per-turn 9 and --reasoning-parser think have no effect without --environment, "
            "--environment-path, --mcp-server, --agent-path, --agent-command or --custom-generate-function-path",
        ),
        ({"value_clip": None}, "--value-clip none has no effect without --token-advantages gae"),
        ({"rm_type": "math:1+format", "rm_format": "a.*"}, None),
        ({"rm_type": "mathformat", "rm_format": "a"}, "--rm-format a has no effect without --rm-type format or"),
        ({"keep_aborted": False}, "--no-keep-aborted has no effect without --pause-generation-mode abort"),
        ({"recompute_modules": ("mlp", "moe")}, "--recompute-modules mlp moe has no effect"),
        ({"kl_coef": 0.1, "token_advantages": "mine:Own"}, None),
    ],
)
def test_the_message_names_what_to_give(values: dict[str, object], expected: str | None) -> None:
    found = problems(**values)
    assert not found if expected is None else expected in found[0]


def test_a_flag_that_another_problem_names_is_left_to_it() -> None:
    arguments = assemble({"max_turns": 0, "agent_timeout": 5.0}, {})
    (left,) = check_needs(arguments, ["--max-turns: expected at least 1, found 0"])
    assert left.startswith("--agent-timeout 5.0")


def test_rejection_of_nothing_is_one_problem() -> None:
    found = flag_problems(assemble(FINE | {"use_rs": True, "rs_level": "sequence", "rs_statistic": "k1"}, {}))
    assert [problem.split(":")[0] for problem in found] == ["--use-rs rejects nothing"]


def test_a_tracker_that_is_off_is_only_noted() -> None:
    arguments = assemble({"wandb_project": "mine", "wandb_group": "a"}, {})
    assert not list(check_needs(arguments, []))
    assert list(need_notes(arguments)) == [
        "--wandb-project mine and --wandb-group a have no effect without --use-wandb"
    ]


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (
            {"on_policy": True, "max_weight_staleness": 4, "server_groups": Path("a.toml")},
            "--max-weight-staleness 4 has no effect with --on-policy",
        ),
        ({"on_policy": True, "stale_group_action": "drop"}, "--stale-group-action drop has no effect with --on-policy"),
        (
            {"server_groups": Path("a.toml"), "rollout_num_gpus": 2},
            "--rollout-num-gpus 2 has no effect with --server-groups",
        ),
        (
            {"rollout_external": ("a:1",), "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 4},
            "--rollout-num-gpus 2 has no effect with --rollout-external",
        ),
    ],
)
def test_a_flag_that_another_takes_the_place_of_is_noted(values: dict[str, object], note: str) -> None:
    assert list(need_notes(assemble(values, {}))) == [f"{note}, which takes its place"]


def test_what_recipes_give_and_a_bound_may_still_use_is_only_noted() -> None:
    arguments = assemble({"kl_loss_type": "k2", "stale_group_action": "drop", "rm_workers": 3}, {})
    assert not list(check_needs(arguments, []))
    assert [note.split(" has no effect without ") for note in need_notes(arguments)] == [
        ["--rm-workers 3", "--rm-type math or format or code or reasoning_gym or --metadata-key"],
        ["--stale-group-action drop", "--max-weight-staleness"],
        ["--kl-loss-type k2", "--use-kl-loss"],
    ]
    assert not list(need_notes(assemble({"stale_group_action": "drop", "max_weight_staleness": 0}, {})))


def test_a_reward_of_a_held_out_set_counts(tmp_path: Path) -> None:
    config = tmp_path / "sets.yaml"
    config.write_text("eval: {datasets: [{name: a, path: a.jsonl, rm_type: math:1.0+remote_rm:0.5}]}")
    assert not problems(rm_type="exact_match", rm_url="http://a", rm_workers=3, eval_config=config)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"max_token_age": 2, "max_weight_staleness": 2},
            "--max-token-age 2 has no effect with --max-weight-staleness",
        ),
        ({"max_token_age": 1, "max_weight_staleness": 2}, None),
        ({"max_token_age": 1}, None),
        ({"token_age_decay": 0.5, "on_policy": True}, "--token-age-decay 0.5 has no effect with --on-policy"),
        ({"token_age_decay": 0.5, "max_weight_staleness": 1}, None),
        (
            {"allow_uncorrected_off_policy": True, "use_tis": True},
            "--allow-uncorrected-off-policy has no effect with --use-tis",
        ),
        ({"allow_uncorrected_off_policy": True}, None),
        ({"eval_prompt_data": ("a.jsonl",), "eval_top_p": 0.9}, "--eval-top-p 0.9 has no effect with greedy"),
        ({"eval_prompt_data": ("a.jsonl",), "eval_top_k": 5}, "--eval-top-k 5 has no effect with greedy"),
        ({"eval_prompt_data": ("a.jsonl",), "eval_top_p": 0.9, "n_samples_per_eval_prompt": 4}, None),
        ({"sequence_parallel": False}, "--no-sequence-parallel has no effect with --tensor-model-parallel-size 1"),
        ({"sequence_parallel": False, "tensor_model_parallel_size": 2}, None),
        ({"use_wandb": True, "wandb_sample_steps": 3, "save_samples": 0}, "--wandb-sample-steps has no effect"),
    ],
)
def test_a_value_without_effect_next_to_others_is_noted(values: dict[str, object], expected: str | None) -> None:
    notes = list(value_notes(assemble(values, {})))
    assert not notes if expected is None else notes[0].startswith(expected)
