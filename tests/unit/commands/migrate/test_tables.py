"""``miles-async migrate --table`` says what becomes of every flag and key that is understood.

# covers: P8
"""

from __future__ import annotations

import pytest

from miles_async.arguments.foreign import FOREIGN_FLAGS, FOREIGN_VALUES
from miles_async.commands.migrate import verl_sft
from miles_async.commands.migrate.defaults import DEFAULTS
from miles_async.commands.migrate.verl_keys import KEYS
from tests.unit.commands.command_line import printed, refused


def lines(system: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    return printed(capsys, "migrate", "--table", system).splitlines()


@pytest.mark.parametrize("system", ["slime", "miles"])
def test_every_flag_and_value_has_a_line_with_verdict_and_reason(
    system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = lines(system, capsys)
    for flag, row in FOREIGN_FLAGS.items():
        (line,) = [line for line in printed if line.startswith((f"{flag}  ", f"{flag} {' or '.join(row.only)}  "))]
        assert line.endswith(f"  {row.verdict}: {row.note.replace('`', '')}")
        for idle, why in row.idle.items():
            assert f"{flag} {idle}  noted: {why}" in printed
    for value in FOREIGN_VALUES.values():
        (line,) = [line for line in printed if line.startswith(f"{value.flag} {value.value}  ")]
        assert (f"works, as {' '.join(value.ours)}" if value.ours else "refused") in line


def test_every_default_that_differs_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    printed = lines("slime", capsys)
    ours = printed[next(n for n, line in enumerate(printed) if line.startswith("# Defaults")) + 1 :]
    assert [line.split()[0] for line in ours] == [default.flag for default in DEFAULTS]
    assert "--kl-loss-type k1  with --use-kl-loss" in ours
    assert "--loss-aggregation sequence_mean  unless --calculate-per-token-loss" in ours
    assert "--eval-temperature  that of training, with --eval-prompt-data or --eval-config" in ours


def test_every_key_of_verl_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    printed = lines("verl", capsys)
    assert len(printed) == len(KEYS) + 1 + len(verl_sft.KEYS)
    assert printed[len(KEYS)] == "# verl.trainer.fsdp_sft_trainer"
    assert "model.partial_pretrain  works: is --hf-checkpoint" in printed[len(KEYS) :]
    assert "data.train_batch_size  works: is --rollout-batch-size" in printed
    assert "critic.optim.lr  works: is --critic-lr, with algorithm.adv_estimator=gae" in printed
    assert "algorithm.kl_ctrl.type fixed  noted: fixed; for adaptive give --kl-target and --kl-horizon" in printed


@pytest.mark.parametrize("words", [[], ["run.sh", "--table", "verl"]])
def test_a_script_or_a_table_is_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected SCRIPT or --table; see miles-async migrate --help" in refused(capsys, "migrate", *words)
