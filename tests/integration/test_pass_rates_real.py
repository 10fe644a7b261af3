"""``--pass-rates``: a run that knows from an earlier one's ledger which prompts are always or never solved.

# covers: R11
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.commands.ledger import ledger
from miles_async.ledger.reader import open_ledger
from tests.integration.real_run import QUICKSTART, RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(420)]

SECONDS = 200.0
PROMPTS = 32
SMALL = (
    *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-batch-size", "8"),
    *("--n-samples-per-prompt", "4", "--eval-prompt-data", "none", "--eval-interval", "none"),
    *("--prompt-data", f"{QUICKSTART / 'assets' / 'reverse' / 'train.jsonl'}@[0:{PROMPTS}]"),
)


def pass_rates(run: RealRun) -> dict[str, float]:
    with open_ledger(run.run_dir / "ledger.sqlite") as reader:
        return {prompt: sum(r >= 1 for r in rewards) / len(rewards) for prompt, rewards in reader.group_rewards()}


def test_what_an_earlier_run_always_or_never_solved_rests_from_the_start(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    with real_run(tmp_path / "first", *SMALL, "--num-rollout", "4", command=imported_reverse) as first:
        assert first.wait(SECONDS) == 0, first.output
    known = pass_rates(first)
    extreme = {prompt for prompt, rate in known.items() if rate in (0, 1)}
    assert extreme
    flags = ("--prompt-sampler", "difficulty", "--difficulty-rest", "1000", "--pass-rates", str(tmp_path / "first"))
    with real_run(tmp_path / "second", *SMALL, *flags, "--num-rollout", "1", command=imported_reverse) as second:
        assert second.wait(SECONDS) == 0, second.output
    assert f"--pass-rates: known of {len(known)} of {PROMPTS} prompts" in second.output
    assert not extreme & {*pass_rates(second)}
    with open_ledger(tmp_path / "second" / "ledger.sqlite") as reader:
        opened, (began, *_) = reader.prompts_opened(), reader.epochs()
    assert opened is not None
    assert opened.earlier_rates == len(known)
    assert (began.prompts, began.left_out) == (PROMPTS - len(extreme), len(extreme))
    assert f"pass rates of {len(known)} prompts were known from earlier runs" in ledger([str(tmp_path / "second")])
