"""Requests to a live run: checked when they come, taken at a boundary, noted for a run that resumes.

# covers: C1, C9
"""

from __future__ import annotations

import pytest

from miles_async.arguments.live import with_flags
from miles_async.errors import ConfigurationError
from miles_async.types import Changes, KeptSetting
from miles_async.wiring.live_settings import LiveSettings
from tests.unit.arguments.test_live import base

READY = base(eval_prompt_data=("test.jsonl",), save="saved")


class Rollout:
    def __init__(self) -> None:
        self.changes: list[Changes] = []

    async def change(self, changes: Changes) -> None:
        self.changes.append(changes)


def live_at(step: int, arguments=READY, rollout: Rollout | None = None, **options) -> LiveSettings:  # type: ignore[no-untyped-def]
    live = LiveSettings(arguments, options.pop("inherited", {}), (rollout or Rollout()).change, **options)
    live.begin(step)
    return live


async def test_a_change_waits_for_the_next_boundary_and_is_handed_over_once() -> None:
    live = live_at(0)
    assert live.take(1, last=False) is None
    assert await live.set({"max-weight-staleness": "1", "lr": "2e-6"}) == (
        "max-weight-staleness 2 → 1, after step 2\nmax-rollout-lead 3 → 2, after step 2\nlr 1e-06 → 2e-06, after step 2"
    )
    assert live.take(2, last=False) == Changes(
        after=2,
        before={"max_weight_staleness": 2, "max_rollout_lead": 3, "lr": 1e-6},
        values={"max_weight_staleness": 1, "max_rollout_lead": 2, "lr": 2e-6},
    )
    assert live.take(3, last=False) is None


async def test_later_changes_add_to_those_that_wait() -> None:
    live = live_at(4)
    await live.set({"max-weight-staleness": "4"})
    await live.set({"max-rollout-lead": "4", "evaluation": "now"})  # more than the bound that is still in force allows
    await live.set({"max-weight-staleness": "5", "checkpoint": "now"})
    changes = live.take(5, last=False)
    assert changes is not None
    assert changes.values == {
        "max_weight_staleness": 5,
        "max_rollout_lead": 4,
        "evaluation": "now",
        "checkpoint": "now",
    }


async def test_of_several_changes_all_are_made_or_none() -> None:
    live = live_at(0)
    with pytest.raises(ConfigurationError, match="--max-rollout-lead 3 is more than --max-weight-staleness 1"):
        await live.set({"lr": "2e-6", "max-weight-staleness": "1", "max-rollout-lead": "3", "evaluation": "now"})
    assert live.take(1, last=False) is None


async def test_a_change_to_what_is_in_force_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"lr is 1e-06 already$"):
        await live_at(0).set({"lr": "1e-6"})
    on_policy = base(max_weight_staleness=None, on_policy=True)
    with pytest.raises(ConfigurationError, match="max-weight-staleness is 0 already, by --on-policy"):
        await live_at(0, on_policy).set({"max-weight-staleness": "1"})


async def test_nothing_changes_before_the_first_step_and_in_the_last_one() -> None:
    live = LiveSettings(READY, {}, Rollout().change)
    with pytest.raises(ConfigurationError, match="the run has not begun its first step"):
        await live.set({"lr": "2e-6"})
    live.begin(0)
    await live.set({"stop": "after-step"})
    live.take(1, last=False)
    with pytest.raises(ConfigurationError, match="the run is in its last step"):
        await live.set({"lr": "2e-6"})
    live = live_at(0)
    live.take(1, last=True)
    with pytest.raises(ConfigurationError, match="the run is in its last step"):
        await live.set({"generation": "paused"})


async def test_a_pause_is_made_at_once() -> None:
    rollout = Rollout()
    live = live_at(3, rollout=rollout)
    assert await live.set({"generation": "paused"}) == "generation paused, from now on"
    assert (await live.settings()).splitlines()[-1] == "generation paused"
    await live.set({"generation": "running"})
    assert rollout.changes == [
        Changes(after=3, before={"generation": "running"}, values={"generation": "paused"}),
        Changes(after=3, before={"generation": "paused"}, values={"generation": "running"}),
    ]
    assert live.take(4, last=False) is None


async def test_a_backend_without_change_keeps_its_settings() -> None:
    live = live_at(0, trainer_changes=False)
    with pytest.raises(ConfigurationError, match=r"lr: the training backend \(--train-backend\) has no change\(\)"):
        await live.set({"lr": "2e-6"})
    await live.set({"max-rollout-lead": "1"})


async def test_the_settings_are_listed_with_what_waits() -> None:
    live = live_at(0)
    await live.set({"max-rollout-lead": "1", "checkpoint": "now"})
    assert (await live.settings()).splitlines() == [
        "max-weight-staleness 2",
        "max-rollout-lead 3 → 1",
        "rollout-concurrency-per-engine 256",
        "lr 1e-06",
        "entropy-coef 0",
        "kl-loss-coef 0",
        "kl-coef 0",
        "generation running",
        "checkpoint now",
    ]


async def test_a_checkpoint_keeps_what_took_effect_with_the_flag_that_was_given() -> None:
    live = live_at(0)
    await live.set({"max-weight-staleness": "1"})
    assert live.kept() == {}  # a checkpoint of a step before it takes effect
    live.take(1, last=False)
    assert live.kept() == {"max_weight_staleness": KeptSetting(flag=2, value=1)}
    await live.set({"max-weight-staleness": "2"})
    live.take(2, last=False)
    assert live.kept() == {}


async def test_a_run_that_resumes_keeps_what_it_inherited() -> None:
    inherited = {"lr": KeptSetting(flag=5e-6, value=1e-6), "entropy_coef": KeptSetting(flag=0.5, value=0.25)}
    live = live_at(7, with_flags(READY, {"entropy_coef": 0.1}), inherited=inherited)  # a flag that was given anew
    assert live.kept() == {"lr": KeptSetting(flag=5e-6, value=1e-6)}
