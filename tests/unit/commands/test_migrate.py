"""``miles-async migrate``: scripts in the ways in which slime's are written, read without running them.

# covers: P8
"""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest

from miles_async.arguments.parser import parse_arguments
from miles_async.cli import main
from miles_async.commands.shell_script import find_command

SCRIPT = r"""#!/bin/bash
pkill -9 python   # before train.py
set -ex
export PYTHONBUFFERED=16
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"

CKPT_ARGS=(
   --hf-checkpoint $BASE_DIR/Qwen3-4B/
   #--hf-checkpoint $BASE_DIR/Qwen3-4B-FP8
   --ref-load ${BASE_DIR}/Qwen3-4B_torch_dist
   --save "/root/my checkpoints"
   --save-interval 20
)
ROLLOUT_ARGS=(--prompt-data /root/dapo.jsonl
   --rm-type math   # not the other one
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --num-rollout ${STEPS:-3000} --rollout-stop '#')
ROLLOUT_ARGS+=(--balance-data)
WANDB_ARGS=(
   # --use-wandb
)
SGLANG="--sglang-mem-fraction-static 0.7 --rollout-num-gpus-per-engine 2"
TP=2
export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ENV_JSON="{
  \"env_vars\": {\"PYTHONPATH\": \"/root/Megatron-LM/\"}
}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{
     "env_vars": {"no_proxy": "localhost,${MASTER_ADDR}"}
   }' \
   -- python3 PROGRAM \
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 \
   --tensor-model-parallel-size ${TP} \
   ${MODEL_ARGS[@]} "${CKPT_ARGS[@]}" ${ROLLOUT_ARGS[@]} \
   ${WANDB_ARGS[@]} $SGLANG
"""
MODEL = """MODEL_ARGS=(
   --num-layers 36
   --swiglu
   --rotary-base "${ROTARY_BASE:-1000000}"
)
"""
WORDS = [
    *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "8", "--tensor-model-parallel-size", "2"),
    *("--num-layers", "36", "--swiglu", "--rotary-base", "1000000"),
    *("--hf-checkpoint", "/models/Qwen3-4B/", "--ref-load", "/models/Qwen3-4B_torch_dist"),
    *("--save", "/root/my checkpoints", "--save-interval", "20"),
    *("--prompt-data", "/root/dapo.jsonl", "--rm-type", "math", "--dynamic-sampling-filter-path"),
    *("slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", "--num-rollout", "3000"),
    *("--rollout-stop", "#", "--balance-data"),
    *("--sglang-mem-fraction-static", "0.7", "--rollout-num-gpus-per-engine", "2"),
]


def written(folder: Path, program: str = "train.py", before: str = "BASE_DIR=/models\n", after: str = "") -> Path:
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "tiny.sh").write_text(MODEL)
    script = folder / "run-tiny.sh"
    script.write_text(before + SCRIPT.replace("PROGRAM", program) + after)
    return script


def migrated(script: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["migrate", str(script)])
    return status, capsys.readouterr().out


def test_the_words_are_those_that_bash_would_give(tmp_path: Path) -> None:
    script = written(tmp_path)
    bare = tmp_path / "bare.sh"  # the same without what must not run in a test
    text = script.read_text().replace("pkill -9 python   #", "#").replace("-- python3 train.py", "-- train.py")
    bare.write_text(text.replace("ray job submit", 'ray() { while [ "$1" != train.py ]; do shift; done; shift; \n'
                                 'printf "%s\\0" "$@"; }\nray job submit'))  # fmt: skip
    by_bash = subprocess.run(["bash", bare], check=True, capture_output=True, text=True, timeout=30).stdout
    assert by_bash.split("\0")[:-1] == WORDS
    command = find_command(script.read_text(), ["train.py", "train_async.py"], tmp_path)
    assert (command.program, command.words) == ("train.py", WORDS)
    assert command.unknown == command.repeated == command.missing == []


def test_what_is_printed_is_read_by_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(tmp_path)
    script.write_text(script.read_text().replace("   --ref-load ${BASE_DIR}/Qwen3-4B_torch_dist\n", ""))
    status, text = migrated(script, capsys)
    assert status == 0, text
    (tmp_path / "run.args").write_text(text)
    parsed = parse_arguments([f"@{tmp_path}/run.args"])
    arguments = parsed.arguments
    assert arguments.model.hf_checkpoint == Path("/models/Qwen3-4B")
    assert arguments.checkpoint.save == Path("/root/my checkpoints")
    assert (arguments.rollout.num_rollout, arguments.rollout.rollout_stop) == (3000, ("#",))
    assert arguments.rewards.group_filter == ("zero_variance",)
    assert arguments.engines.sglang_extra == ("--mem-fraction-static", "0.7")
    assert arguments.staleness.on_policy
    assert not parsed.notes
    assert not parsed.checks
    assert "#   --balance-data changes nothing: tokens always are balanced" in text
    assert (
        "# Left out, since config.json of --hf-checkpoint says it:\n#   --num-layers, --swiglu, --rotary-base" in text
    )


def test_train_async_has_a_bound_and_a_correction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = migrated(written(tmp_path, "/root/slime/train_async.py"), capsys)
    assert "--max-weight-staleness 1\n--use-rollout-logprobs\n" in text
    script = written(tmp_path, "train_async.py --use-tis")
    assert "--use-rollout-logprobs" not in migrated(script, capsys)[1]


def test_what_cannot_be_mapped_or_known_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(tmp_path, "train.py --moe-enable-deepep --no-such-flag 3 --lr 1e-6", before="TP=4\n")
    (tmp_path / "models" / "tiny.sh").unlink()
    status, text = migrated(script, capsys)
    assert status == 1
    assert "\n--lr 1e-6\n" in text
    assert "\n--moe-enable-deepep" not in text
    assert "\n--hf-checkpoint '$BASE_DIR/Qwen3-4B/'\n" in text
    assert "[@]" not in text
    assert "#   --moe-enable-deepep does not exist here: tokens reach experts by alltoall" in text
    assert "#   unknown flag --no-such-flag" in text
    assert "# Only the shell knows these variables: write their values:\n#   MODEL_ARGS\n#   BASE_DIR\n" in text
    assert "# Assigned more than once, the last one was taken: look at them:\n#   TP\n" in text
    assert "# Sourced by the script and not found, so its flags are missing:\n#   models/tiny.sh\n" in text


def test_a_command_line_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("+ python3 /root/miles/train.py --lr 1e-6 --hf-checkpoint m\n"))
    assert main(["migrate", "-"]) == 0
    assert "--lr 1e-6\n--hf-checkpoint m\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "run.sh",
            "python3 other.py --lr 1\n",
            "no command with one of train.py, train_async.py, verl.trainer.main_ppo, ",
        ),
        ("run.sh", "A=(\n --x 'open\n)\n", 'No closing quotation: "--x \'open"'),
        ("run.py", "U.execute_train()", "a script in Python decides its flags as it runs"),
        ("run.sh", None, "No such file"),
    ],
)
def test_wrong_input(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / name) in error
    assert message in error
