"""Flags that may change while a run is live: what is refused, and what a run that resumes takes over.

# covers: C1, C9
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.live import (
    IN_FORCE,
    check_change,
    check_requests,
    in_force,
    parse_changes,
    with_flags,
    with_kept,
)
from miles_async.arguments.specification import flag_specifications
from miles_async.errors import ConfigurationError
from miles_async.types import KeptSetting

BASE = with_flags(
    Arguments(),
    {"hf_checkpoint": Path("model"), "prompt_data": ("prompts.jsonl",), "rm_type": "exact_match"}
    | {"max_weight_staleness": 2, "use_rollout_logprobs": True},
)


def base(**flags: FlagValue) -> Arguments:
    return with_flags(BASE, flags)


def change(arguments: Arguments, words: dict[str, str], *, started: Arguments | None = None) -> Arguments:
    flags, _ = parse_changes(words)
    wanted = with_flags(arguments, flags)
    check_change(started or arguments, arguments, wanted)
    return wanted


DECAYING = base(lr=1e-5, min_lr=1e-6, lr_decay_style="linear")
SNAPSHOTS = base(prox_logp_method="snapshots", use_rollout_logprobs=False, use_tis=True)
ADAPTIVE = base(use_kl_loss=True, kl_loss_coef=0.1, kl_target=0.01)


def test_every_name_is_a_flag() -> None:
    assert IN_FORCE.keys() <= flag_specifications().keys()


def test_names_are_those_of_flags_with_dashes_or_without() -> None:
    assert parse_changes({"max-weight-staleness": "none", "lr": "1e-5", "--kl_coef": "0"}) == (
        {"max_weight_staleness": None, "lr": 1e-5, "kl_coef": 0.0},
        {},
    )
    assert parse_changes({"generation": "paused", "stop": "after-step"}) == (
        {},
        {"generation": "paused", "stop": "after-step"},
    )


@pytest.mark.parametrize(
    ("word", "text", "message"),
    [
        ("lr", "fast", "lr: expected a number, found 'fast'"),
        ("max-weight-staleness", "1.5", 'max-weight-staleness: expected a whole number or "none"'),
        ("generation", "off", "generation: expected paused or running, found 'off'"),
        ("seed", "1", "--seed cannot change while the run is live: max-weight-staleness, "),
        ("learning-rate", "1", "there is no setting learning-rate; there are max-weight-staleness, "),
        ("max-weight-stalenes", "1", "no setting max-weight-stalenes; did you mean max-weight-staleness?"),
    ],
)
def test_words_that_mean_nothing(word: str, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse_changes({word: text})


def test_the_lead_follows_the_bound_unless_it_was_given() -> None:
    wider = change(BASE, {"max-weight-staleness": "4"})
    assert (in_force(wider)["max_weight_staleness"], in_force(wider)["max_rollout_lead"]) == (4, 5)
    given = base(max_rollout_lead=2)
    assert in_force(change(given, {"max-weight-staleness": "4"}))["max_rollout_lead"] == 2


@pytest.mark.parametrize(
    ("arguments", "words", "message"),
    [
        (BASE, {"lr": "-1"}, "--lr: expected more than 0"),
        (DECAYING, {"lr": "1e-7"}, "--min-lr 1e-06 is larger than --lr 1e-07"),
        (BASE, {"max-weight-staleness": "-1"}, "--max-weight-staleness: expected at least 0"),
        (BASE, {"max-rollout-lead": "5"}, "--max-rollout-lead 5 is more than --max-weight-staleness 2 + 1"),
        (BASE, {"kl-loss-coef": "0.1"}, "--kl-loss-coef 0.1 has no effect without --use-kl-loss"),
        (BASE, {"kl-coef": "0.1"}, "--kl-coef 0.1 has no effect without --token-advantages"),
        (BASE, {"rollout-concurrency-per-engine": "257"}, "expected at most 256"),
        (base(stale_group_action="wait"), {"max-weight-staleness": "1"}, "expected 2 or more"),
        (base(entropy_coef_end=0.1), {"entropy-coef": "0.2"}, "--entropy-coef-end 0.1 moves it"),
        (ADAPTIVE, {"kl-loss-coef": "0.2"}, "kl-loss-coef: --kl-target 0.01 adapts it"),
        (base(token_advantages="gae"), {"kl-coef": "0.1"}, "with --token-advantages kl_in_reward only"),
        (
            SNAPSHOTS,
            {"max-weight-staleness": "3"},
            "snapshots keeps the weights of as many versions as the run started with; expected at most 2",
        ),
    ],
)
def test_what_a_live_run_cannot_follow_is_refused(arguments: Arguments, words: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        change(arguments, words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (BASE, {"max-weight-staleness": "0"}),
        (base(max_weight_staleness=None), {"max-weight-staleness": "3"}),
        (BASE, {"max-weight-staleness": "none", "max-rollout-lead": "9"}),
        (base(stale_group_action="wait"), {"max-weight-staleness": "3"}),
        (base(use_kl_loss=True), {"kl-loss-coef": "0.1"}),
        (base(token_advantages="kl_in_reward", kl_coef=0.1), {"kl-coef": "0.2"}),
        (SNAPSHOTS, {"max-weight-staleness": "1"}),
    ],
)
def test_what_it_can_follow_is_accepted(arguments: Arguments, words: dict[str, str]) -> None:
    assert in_force(change(arguments, words)) != in_force(arguments)


def test_what_parts_were_made_for_is_the_limit_not_what_is_in_force() -> None:
    assert (
        change(base(rollout_concurrency_per_engine=8), {"rollout-concurrency-per-engine": "256"}, started=BASE) == BASE
    )


def test_requests_need_what_they_ask_for() -> None:
    with pytest.raises(ConfigurationError, match=r"2 problems:(\n.*)*--eval-config(\n.*)*--save"):
        check_requests(BASE, {"evaluation": "now", "checkpoint": "now", "stop": "after-step"})
    check_requests(BASE, {"stop": "after-step", "generation": "paused"})
    check_requests(base(eval_config=Path("eval.yaml")), {"evaluation": "now"})


def test_a_kept_setting_replaces_the_flag_that_it_replaced_before_and_no_other() -> None:
    kept = {"max_weight_staleness": KeptSetting(flag=2, value=None), "lr": KeptSetting(flag=5e-6, value=1e-6)}
    resumed, notes = with_kept(BASE, kept)
    assert resumed.staleness.max_weight_staleness is None
    assert resumed.optimizer == BASE.optimizer
    assert notes == [
        "--max-weight-staleness None instead of 2: set before the checkpoint was written",
        f"--lr {BASE.optimizer.lr}, and not 1e-06 as set before the checkpoint: the flag is another",
    ]
