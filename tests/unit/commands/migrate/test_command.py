"""``miles-async migrate``: scripts in the ways in which slime's are written, read without running them.

# covers: P8
"""

from __future__ import annotations

import io
import subprocess
import tomllib
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest

from miles_async.arguments.parser import parse_arguments
from miles_async.cli import main
from miles_async.commands.migrate.shell_script import find_command
from tests.unit.commands.command_line import refused

FINE = "--hf-checkpoint m --prompt-data p.jsonl --n-samples-per-prompt 8 --rm-type math --label-key label"
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
   --num-rollout ${STEPS:-3000} --rollout-stop '#' @user --n-samples-per-prompt 8
   --label-key label --apply-chat-template)
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
   --tensor-model-parallel-size ${TP} --colocate \
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
    *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "8", "--tensor-model-parallel-size", "2", "--colocate"),
    *("--num-layers", "36", "--swiglu", "--rotary-base", "1000000"),
    *("--hf-checkpoint", "/models/Qwen3-4B/", "--ref-load", "/models/Qwen3-4B_torch_dist"),
    *("--save", "/root/my checkpoints", "--save-interval", "20"),
    *("--prompt-data", "/root/dapo.jsonl", "--rm-type", "math", "--dynamic-sampling-filter-path"),
    *("slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", "--num-rollout", "3000"),
    *("--rollout-stop", "#", "@user", "--n-samples-per-prompt", "8", "--label-key", "label", "--apply-chat-template"),
    "--balance-data",
    *("--sglang-mem-fraction-static", "0.7", "--rollout-num-gpus-per-engine", "2"),
]


def written(folder: Path, program: str = "train.py", before: str = "BASE_DIR=/models\n", after: str = "") -> Path:
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "tiny.sh").write_text(MODEL)
    script = folder / "run-tiny.sh"
    script.write_text(before + SCRIPT.replace("PROGRAM", program) + after)
    return script


Migrate = Callable[..., tuple[int, str]]


@pytest.fixture
def migrated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Migrate:
    """Exit status and output for a script, a file or its text, or for the words of a command line."""

    def migrate(words: str = "", program: str = "train.py", script: Path | str | None = None) -> tuple[int, str]:
        text = script if isinstance(script, str) else f"python3 {program} {words}\n"
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status = main(["migrate", str(script) if isinstance(script, Path) else "-"])
        return status, capsys.readouterr().out

    return migrate


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


def test_what_is_printed_is_read_by_train(tmp_path: Path, migrated: Migrate) -> None:
    script = written(tmp_path)
    script.write_text(script.read_text().replace("   --ref-load ${BASE_DIR}/Qwen3-4B_torch_dist\n", ""))
    status, text = migrated(script=script)
    assert status == 0, text
    (tmp_path / "run.args").write_text(text)
    parsed = parse_arguments([f"@{tmp_path}/run.args"])
    arguments = parsed.arguments
    assert arguments.model.hf_checkpoint == Path("/models/Qwen3-4B")
    assert arguments.checkpoint.save == Path("/root/my checkpoints")
    assert (arguments.rollout.num_rollout, arguments.rollout.rollout_stop) == (3000, ("#", "@user"))
    assert arguments.rewards.group_filter == ("zero_variance",)
    assert arguments.engines.sglang_extra == ("--mem-fraction-static", "0.7")
    assert arguments.staleness.on_policy
    assert (arguments.cluster.rollout_num_gpus, arguments.engines.engine_max_restarts) == (8, 0)
    assert not parsed.notes
    assert not parsed.checks
    assert "#   --balance-data changes nothing: tokens always are balanced" in text
    assert (
        "# Left out, since config.json of --hf-checkpoint or another flag says it:\n"
        "#   --num-layers, --swiglu, --rotary-base" in text
    )


def test_train_async_has_a_bound_and_a_correction(tmp_path: Path, migrated: Migrate) -> None:
    _, text = migrated(script=written(tmp_path, "/root/slime/train_async.py"))
    assert "--max-weight-staleness 1\n--use-rollout-logprobs\n" in text
    script = written(tmp_path, "train_async.py --use-tis")
    assert "--use-rollout-logprobs" not in migrated(script=script)[1]


@pytest.mark.parametrize("program", ["train.py", "train_async.py"])
def test_a_bound_of_the_script_stays(program: str, tmp_path: Path, migrated: Migrate) -> None:
    _, text = migrated(script=written(tmp_path, f"{program} --max-weight-staleness 2"))
    (tmp_path / "run.args").write_text(text)
    staleness = parse_arguments([f"@{tmp_path}/run.args"]).arguments.staleness
    assert (staleness.max_weight_staleness, staleness.on_policy) == (2, False)
    assert "\n--use-rollout-logprobs\n" in text


def test_defaults_of_slime_are_written_out(tmp_path: Path, migrated: Migrate) -> None:
    words = "--use-kl-loss --eval-prompt-data aime a.jsonl --rollout-temperature 0.8"
    _, text = migrated(words)
    (tmp_path / "run.args").write_text(text)
    arguments = parse_arguments([f"@{tmp_path}/run.args"]).arguments
    data, algorithm, optimizer = arguments.data, arguments.algorithm, arguments.optimizer
    assert (data.input_key, data.label_key, data.metadata_key) == ("input", None, "metadata")
    assert (data.apply_chat_template, data.rollout_shuffle, data.tool_key) == (False, False, None)
    assert (arguments.rollout.n_samples_per_prompt, arguments.cluster.actor_num_gpus_per_node) == (1, 8)
    assert (algorithm.loss_aggregation, algorithm.eps_clip_c, algorithm.kl_loss_type) == ("sequence_mean", None, "k1")
    assert (optimizer.lr_decay_style, optimizer.weight_decay, optimizer.adam_beta2) == ("linear", 0.01, 0.999)
    assert arguments.evaluation.eval_temperature == 0.8


@pytest.mark.parametrize(
    ("words", "dual"),
    [
        ("--advantage-estimator cispo", 0),
        ("--advantage-estimator gspo", 1),
        ("--policy-loss=sapo", 0),
        ("--policy-loss losses:Own", 1),
    ],
)
def test_the_default_of_dual_clipping_is_for_losses_that_read_it(words: str, dual: int, migrated: Migrate) -> None:
    status, text = migrated(f"{FINE} {words}")
    assert status == 0, text
    assert text.count("\n--eps-clip-c none\n") == dual


def test_held_out_prompts_of_a_file_have_the_temperature_of_training(migrated: Migrate) -> None:
    _, text = migrated("--eval-config sets.yaml --rollout-temperature 0.8")
    assert "\n--eval-temperature 0.8\n" in text


@pytest.mark.parametrize(
    "flag",
    ["--fully-async", "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"],
)
def test_a_loop_without_a_bound_gets_one(flag: str, migrated: Migrate) -> None:
    status, text = migrated(f"{FINE} {flag}", "train_async.py")
    assert status == 0, text
    assert "the version before" not in text
    assert "\n--max-weight-staleness 2\n--use-rollout-logprobs\n" in text
    _, text = migrated(f"{FINE} {flag} --max-weight-staleness 4", "train_async.py")
    assert text.count("--max-weight-staleness") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--ref-load r --kl-coef 0.00",
            "--ref-load r changes nothing: without a KL there is no reference, and the run",
        ),
        (
            "--ref-load other_torch_dist --use-kl-loss --kl-loss-coef 0.00",
            "--ref-load other_torch_dist changes nothing: with coefficient 0 the KL to --hf-checkpoint",
        ),
        ("--num-epoch 3 --num-rollout 50", "--num-epoch changes nothing: --num-rollout is given"),
        ("--num-rollout 50 --num-epoch=3", "--num-epoch changes nothing: --num-rollout is given"),
    ],
)
def test_what_others_leave_without_effect_is_no_obstacle(words: str, line: str, migrated: Migrate) -> None:
    status, text = migrated(f"{FINE} {words}")
    assert status == 0, text
    assert line in text.partition("# Not needed here:\n")[2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--ref-load r --use-kl-loss --kl-loss-coef 0.1", "--ref-load does not exist here: use --ref-hf-checkpoint"),
        ("--ref-load r --kl-coef 0.1", "--ref-load does not exist here: use --ref-hf-checkpoint"),
        ("--ref-load r --use-kl-loss --kl-loss-coef $KL", "--ref-load does not exist here: use --ref-hf-checkpoint"),
        ("--ref-load r --kl-coef $KL", "--ref-load does not exist here: use --ref-hf-checkpoint"),
        (
            "--ref-load other/m_torch_dist --hf-checkpoint m2 --use-kl-loss --kl-loss-coef 0.1",
            "--ref-load does not exist here: use --ref-hf-checkpoint",
        ),
    ],
)
def test_what_has_an_effect_has_to_be_replaced(words: str, line: str, migrated: Migrate) -> None:
    status, text = migrated(words)
    assert status == 1
    assert line in text.partition("# Could not be mapped:\n")[2]


def test_a_missing_backslash_is_told(migrated: Migrate) -> None:
    _, text = migrated(script="python3 train.py --lr 1\n  --seed 3\n")
    assert "--lr 1\n--seed 3\n" in text
    assert "which were taken as a part of the command: look at them:\n#   --seed\n" in text


def test_what_a_condition_decides_is_told(migrated: Migrate) -> None:
    script = "ARGS=(--lr 1)\nif true; then\n  ARGS+=(--seed 3)\nfi\npython3 train.py ${ARGS[@]}"
    _, text = migrated(script=script)
    assert "--lr 1\n--seed 3\n" in text
    assert "under a condition or in a loop, taken once as if it held: look at them:\n#   ARGS\n" in text


@pytest.mark.parametrize(
    "script",
    [
        'LINE="$(python3 "${HERE}/utils/model_args_utils.py" "qwen3-4B")" || exit 1\nread -ra MODEL_ARGS <<< "${LINE}"',
        'read -r -a MODEL_ARGS <<< "$(python3 /root/utils/model_args_utils.py qwen3-4B)"',
        "MODEL_ARGS=($(python3 /root/utils/model_args_utils.py qwen3-4B))",
    ],
)
def test_flags_that_describe_the_model_are_left_out(script: str, migrated: Migrate) -> None:
    _, text = migrated(script=f"{script}\npython3 train.py ${{MODEL_ARGS[@]}} --swiglu --lr 1\n")
    assert "another flag says it:\n#   --swiglu, MODEL_ARGS\n" in text
    assert "Only the shell knows" not in text
    assert "\n--lr 1\n" in text


def test_defaults_stay_out_where_the_script_decides(migrated: Migrate) -> None:
    _, text = migrated("--input-key=q --apply-chat-template --calculate-per-token-loss")
    assert "\n--tool-key tools\n" in text
    for absent in ("--input-key input", "--no-apply", "--loss-aggregation", "--kl-loss-type", "--eval-temperature"):
        assert f"\n{absent}" not in text
    assert "--input-key q\n" in text or "--input-key=q\n" in text


@pytest.mark.parametrize("template", ["", "--apply-chat-template"])
def test_a_script_of_supervised_fine_tuning(template: str, migrated: Migrate) -> None:
    words = (
        f"--hf-checkpoint m --prompt-data p.parquet --input-key messages {template} --rollout-batch-size 8 "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --calculate-per-token-loss"
    )
    status, text = migrated(words)
    assert status == 0, text
    assert "--no-apply-chat-template" not in text  # messages are rendered without the flag, too
    assert "\n--tool-key tools\n" in text
    assert "--on-policy" not in text
    assert "--eps-clip-c" not in text


def test_what_train_refuses_is_told(migrated: Migrate) -> None:
    words = "--hf-checkpoint m --prompt-data p.jsonl --apply-chat-template --n-samples-per-prompt 8 --rm-type math"
    fine = f"{words} --label-key label"
    assert migrated(f"{fine} --eval-input-key input")[0] == 0
    refused = {
        words: "--rm-type math compares with a label: --label-key none leaves it without",
        f"{words} --custom-rm-path a.reward": "my_function; hooks have other signatures here: adapt yours (docs/ext",
        f"{fine} --rollout-top-p 0.9": "--rollout-top-p 0.9: SGLang samples from what is left",
        f"{fine} --eval-input-key q": "--eval-input-key q: held-out files have the columns of --prompt-data, and",
        f"{fine} --lr fast": "--lr: expected a number, found 'fast'",
        f"{fine} --eval-interval 5": "--eval-interval 5 has no effect without --eval-prompt-data",
        f"{fine} --sglang-frobnicate 1": "--sglang-frobnicate is passed on",
        f"{fine} --moe-permute-fusion maybe": "moe-permute-fusion",
    }
    for given, reason in refused.items():
        status, text = migrated(given)
        assert status == 1
        assert reason in text.partition("# `train` would refuse this:\n#   ")[2]


def test_files_that_are_elsewhere_are_not_looked_at(tmp_path: Path, migrated: Migrate) -> None:
    here = tmp_path / "sets.yaml"
    groups = tmp_path / "fleet.toml"
    words = f"{FINE} --server-groups {groups} --use-opd --eval-config {here} --eval-interval 5"
    status, text = migrated(words)
    assert status == 0, text
    here.write_text("eval: {datasets: [{name: a}]}")
    groups.write_text("[group]")
    status, text = migrated(f"{words} --sglang-frobnicate 1")
    assert status == 1
    refused = text.partition("# `train` would refuse this:\n")[2]
    assert f"#   --eval-config {here}: " in refused
    assert f"#   --server-groups {groups}: " in refused
    assert "#   --sglang-frobnicate is passed on" in refused


def test_sides_that_share_gpus_and_several_nodes(migrated: Migrate) -> None:
    status, text = migrated(f"{FINE} --colocate")
    assert status == 0, text
    status, text = migrated(f"{FINE} --actor-num-nodes 2")
    assert status == 0, text
    assert "\n--ray-address auto\n" in text


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ("", {"--rollout-num-gpus 16"}),
        ("--rollout-num-gpus-per-engine 16", {"--rollout-num-nodes-per-engine 2", "--rollout-num-gpus 16"}),
        (
            "--actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 8",
            {"--rollout-num-nodes-per-engine 2", "--rollout-num-gpus 8"},
        ),
    ],
)
def test_sides_that_share_gpus_of_several_nodes(given: str, lines: set[str], migrated: Migrate) -> None:
    status, text = migrated(f"{FINE} --colocate --actor-num-nodes 2 {given}")
    assert status == 0, text
    expected = {"--ray-address auto", "--weight-transport object_store", "--engine-max-restarts 0"}
    assert {*text.splitlines()} >= expected | lines


def test_the_transport_of_the_script_is_kept(migrated: Migrate) -> None:
    shared = "--weight-transport disk --weight-staging-dir /shared"
    status, text = migrated(f"{FINE} --colocate --actor-num-nodes 2 {shared}")
    assert status == 0, text
    assert text.count("--weight-transport ") == 1
    assert "\n--engine-max-restarts 0\n" in text


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ("--rollout-num-gpus-per-engine 8", 1),
        ("--rollout-num-gpus-per-engine 16", 2),
        ("--rollout-num-gpus-per-engine 8 --num-gpus-per-node 4", 2),
        ("--rollout-num-gpus-per-engine 16 --rollout-num-nodes-per-engine 4", 4),
    ],
)
def test_engines_larger_than_a_node_have_several(given: str, nodes: int, migrated: Migrate) -> None:
    text = migrated(f"{FINE} --rollout-num-gpus 16 {given}")[1]
    assert text.count("--rollout-num-nodes-per-engine ") == (nodes > 1)
    assert f"--rollout-num-nodes-per-engine {nodes}\n" in text or nodes == 1


def test_what_cannot_be_mapped_or_known_is_told(tmp_path: Path, migrated: Migrate) -> None:
    script = written(tmp_path, "train.py --data-source-path $OWN --no-such-flag 3 --lr 1e-6", before="TP=4\n")
    (tmp_path / "models" / "tiny.sh").unlink()
    status, text = migrated(script=script)
    assert status == 1
    assert "\n--lr 1e-6\n" in text
    assert "\n--data-source-path" not in text
    assert "\n--hf-checkpoint '$BASE_DIR/Qwen3-4B/'\n" in text
    assert "[@]" not in text
    assert "#   --data-source-path does not exist here: prompts come from --prompt-data" in text
    assert "#   unknown flag --no-such-flag" in text
    assert "--set NAME=VALUE:\n#   MODEL_ARGS\n#   BASE_DIR\n" in text
    assert "# Assigned more than once, the last one was taken: look at them:\n#   TP\n" in text
    assert "# Sourced by the script and not found, so its flags are missing:\n#   models/tiny.sh\n" in text


@pytest.mark.parametrize(
    "before",
    [
        "+ ",
        "PYTHONUNBUFFERED=1 ",
        "CUDA_VISIBLE_DEVICES=0,1 A='x y' ",
        "export no_proxy=127.0.0.1 && export PYTHONUNBUFFERED=1 && ray job submit --address=http://a:1 -- ",
        "cd /root/miles && ",
    ],
)
def test_a_command_line_from_stdin(before: str, migrated: Migrate) -> None:
    status, text = migrated(script=f"{before}python3 /root/miles/train.py --lr 1e-6 --hf-checkpoint m\n")
    assert status == 1  # neither prompts nor a reward
    assert "--lr 1e-6\n--hf-checkpoint m\n" in text


def test_variables_before_the_command_are_put_in(migrated: Migrate) -> None:
    script = "CMD='python3 train.py --lr 2'\nexport M=m && LR=1e-6 python3 train.py --lr $LR --hf-checkpoint $M # A=1\n"
    assert "--lr 1e-6\n--hf-checkpoint m\n" in migrated(script=script)[1]


def test_keys_of_verl_that_are_left_over_have_reasons(migrated: Migrate) -> None:
    words = "trainer.no_such_key=7 actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    unused = "actor_rollout_ref.rollout.free_cache_engine=True"
    status, text = migrated(f"{words} {unused}", "-m verl.trainer.main_ppo")
    assert status == 1
    assert "--rollout-num-gpus-per-engine 2\n" in text
    notes, unmapped = text.split("# Not needed here:\n")[1].split("# Could not be mapped:\n")
    assert unused in notes
    assert "#   trainer.no_such_key=7: unknown key\n" in unmapped


def test_the_program_of_verl_with_its_own_queue(migrated: Migrate) -> None:
    words = (
        "--config-path=config --config-name=transfer_queue_ppo_megatron_trainer data.train_files=a.parquet "
        "data.train_batch_size=128 actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=8 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=32 algorithm.adv_estimator=grpo transfer_queue.enable=True"
    )
    status, text = migrated(words, "-m verl.experimental.transfer_queue.main_ppo")
    assert status == 0, text
    assert "\n--rollout-batch-size 128\n" in text
    assert "transfer_queue.enable=True: batches go through Ray's object store" in text


def test_the_fully_asynchronous_program_of_verl_is_whole(migrated: Migrate) -> None:
    words = (
        "data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=0 rollout.test_freq=10 "
        "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=32 "
        "algorithm.adv_estimator=grpo rollout.total_rollout_steps=51200 async_training.require_batches=4"
    )
    program = "-m verl.experimental.fully_async_policy.fully_async_main"
    status, text = migrated(words, program)
    assert status == 0, text
    for flag in (
        "--rollout-batch-size 128",
        "--num-steps-per-rollout 4",
        "--num-rollout 400",
        "--eval-interval 40",
        "--update-weights-interval 4",
    ):
        assert f"\n{flag}\n" in text


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
    error = refused(capsys, "migrate", str(tmp_path / name))
    assert str(tmp_path / name) in error
    assert message in error


@pytest.mark.parametrize("reference", ["/root/m_torch_dist", "/elsewhere/m_torch_dist/", "/models/m"])
def test_a_reference_that_is_the_converted_model_is_the_model(reference: str, migrated: Migrate) -> None:
    status, text = migrated(
        f"{FINE} --hf-checkpoint /models/m/ --ref-load {reference} --use-kl-loss --kl-loss-coef 0.1"
    )
    assert status == 0, text
    assert "\n--ref-hf-checkpoint /models/m/\n" in text
    assert f"#   --ref-load {reference} is taken as --ref-hf-checkpoint /models/m/: by its name" in text


@pytest.mark.parametrize("kl", ["", "--use-kl-loss --kl-loss-coef 0.1"])
@pytest.mark.parametrize("model", ["/m/Qwen3-4B-INT4/", "/m/Qwen3-4B_w4a16"])
def test_engines_that_read_another_precision_are_told(model: str, kl: str, migrated: Migrate) -> None:
    status, text = migrated(f"{FINE} --hf-checkpoint {model} --ref-load /m/Qwen3-4B_torch_dist {kl}")
    assert status == 1
    assert f"in 4 bits from --hf-checkpoint {model}: here trainer and engines share one model, in bf16" in text
    assert "changes nothing: without a KL" not in text


@pytest.mark.parametrize("model", ["/m/Qwen3-4B-FP8/", "/m/Qwen3-4B_fp8"])
@pytest.mark.parametrize("reference", ["/m/Qwen3-4B_torch_dist", "/m/Qwen3-4B-FP8_torch_dist"])
def test_engines_that_read_float8_generate_with_it(model: str, reference: str, migrated: Migrate) -> None:
    status, text = migrated(f"{FINE} --hf-checkpoint {model} --ref-load {reference}")
    assert status == 0, text
    assert f"\n--hf-checkpoint {model}\n" in text
    assert "\n--rollout-quantization fp8\n" in text
    assert f"#   --hf-checkpoint {model} is, by its name, in float8" in text


def test_a_reference_in_bf16_of_a_model_in_float8_is_that_model(migrated: Migrate) -> None:
    kl = "--use-kl-loss --kl-loss-coef 0.1"
    status, text = migrated(f"{FINE} --hf-checkpoint /m/Qwen3-4B-FP8 --ref-load /m/Qwen3-4B_torch_dist {kl}")
    assert status == 0, text
    assert "\n--ref-hf-checkpoint /m/Qwen3-4B-FP8\n" in text


def test_variables_for_the_trainer_are_set_in_the_environment(migrated: Migrate) -> None:
    variables = """'{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "MINE": "1", "A_TOKEN": "hidden"}'"""
    status, text = migrated(f"{FINE} --train-env-vars {variables}")
    assert status == 0, text
    _, _, told = text.partition("# Set in the environment:\n")
    assert told.startswith("#   PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n#   MINE=1\n#   A_TOKEN\n")
    assert "hidden" not in text
    (forwarded,) = [line for line in text.splitlines() if line.startswith("--forward-env")]
    assert {"PYTHONPATH", "MINE"} <= set(forwarded.split())
    assert migrated(f"{FINE} --train-env-vars '[1]'")[0] == 1


def test_one_step_per_rollout_batch(migrated: Migrate) -> None:
    status, text = migrated(f"{FINE} --global-batch-size 64 --use-dynamic-global-batch-size")
    assert status == 0, text
    assert "\n--global-batch-size" not in text
    assert "#   --use-dynamic-global-batch-size is one optimizer step per rollout batch" in text
    assert migrated(f"{FINE} --num-steps-per-rollout 2 --use-dynamic-global-batch-size")[0] == 1


def test_the_home_directory_is_a_tilde(migrated: Migrate) -> None:
    status, text = migrated(script=f"python3 train.py {FINE} --save $HOME/a --run-dir ${{HOME}}/b\n")
    assert status == 0, text
    assert "\n--save '~/a'\n" in text
    assert "\n--run-dir '~/b'\n" in text


def test_a_variable_of_a_flag_that_is_left_out_need_not_be_known(migrated: Migrate) -> None:
    status, text = migrated(script=f"python3 train.py {FINE} --rotary-base $BASE --seq-length ${{LENGTH}}\n")
    assert status == 0, text
    assert "Only the shell knows" not in text


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        (f"{FINE} --hf-checkpoint m $EXTRA", "EXTRA"),
        (f"{FINE} --spec a b $EXTRA", "EXTRA"),
        (f"{FINE} --swiglu $EXTRA", "EXTRA"),
        (f"{FINE} --rotary-base 1 $EXTRA", "EXTRA"),
        (f"{FINE} --rotary-base $A --wandb-group $A", "A"),
        (
            f"{FINE} --sglang-speculative-draft-model-path $HOME/d",
            "HOME, for which --sglang-speculative-draft-model-path has",
        ),
    ],
)
def test_what_may_make_a_difference_has_to_be_known(words: str, unknown: str, migrated: Migrate) -> None:
    status, text = migrated(script=f"python3 train.py {words}\n")
    assert status == 1
    assert f"\n#   {unknown}" in text.partition("# Only the shell knows these")[2]


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        ("trainer.experiment_name=run_$(hostname)", "trainer.experiment_name=run_$(hostname)"),
        ("$EXTRA", "EXTRA"),
        ("actor_rollout_ref.actor.use_kl_loss=$1", "1"),
    ],
)
def test_what_only_the_shell_knows_of_a_recipe_of_verl(words: str, unknown: str, migrated: Migrate) -> None:
    status, text = migrated(script=f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet {words}\n")
    assert status == 1
    assert f"\n#   {unknown}\n" in text.partition("# Only the shell knows these")[2]


def test_remarks_of_several_lines_stay_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo --config-name mine\n")
    (tmp_path / "mine.yaml").write_text('trainer: {frobnicate: "a\\nb"}\n')
    assert main(["migrate", str(script)]) == 1
    assert "#   trainer.frobnicate=a b: unknown key\n" in capsys.readouterr().out


def test_variables_of_the_environment_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {FINE} --hf-checkpoint $BASE_DIR/m --save $BASE_DIR/s_$(date +%Y)\n")
    assert main(["migrate", str(script), "--set", "BASE_DIR=/data"]) == 0
    shown = capsys.readouterr().out
    assert "\n--hf-checkpoint /data/m\n--save /data/s_2" in shown
    assert "# A date of the script is that of now in these: look at them before a second run:\n" in shown
    assert "BASE has no effect" in refused(capsys, "migrate", script, "--set", "BASE=/data")
    assert "--set a-b=1: expected NAME=VALUE" in refused(capsys, "migrate", script, "--set", "a-b=1")
    assert "--set is for a SCRIPT" in refused(capsys, "migrate", "--table", "slime", "--set", "A=1")


def test_what_the_environment_holds_here_is_named_and_a_key_is_not_shown(migrated: Migrate) -> None:
    given = "--hf-checkpoint m --prompt-data p.jsonl --label-key label --rm-type math --n-samples-per-prompt 8"
    status, shown = migrated(f"{given} --num-rollout 3 --wandb-key secret --wandb-host https://w --save s")
    assert "# Set in the environment:\n#   WANDB_API_KEY\n#   WANDB_BASE_URL\n" in shown
    assert "secret" not in shown
    assert (status, "Could not be mapped" in shown) == (0, False), shown


@pytest.mark.parametrize("system", ["slime", "miles"])
def test_a_reward_that_asks_a_teacher_is_the_teacher(system: str, tmp_path: Path, migrated: Migrate) -> None:
    module = f"{system}.rollout.on_policy_distillation"
    asked = f"--custom-rm-path {module}.reward_func --rm-url http://a:1/generate --use-opd --opd-type sglang"
    zeros = f"--custom-reward-post-process-path {module}.post_process_rewards"
    model = "--hf-checkpoint m --prompt-data p.jsonl --n-samples-per-prompt 4 --advantage-estimator gspo"
    (tmp_path / "fleet.toml").write_text('[groups.train]\n[groups.teacher]\nrole = "frozen"\n')
    status, text = migrated(f"{model} {asked} {zeros} --server-groups {tmp_path}/fleet.toml")
    assert status == 0, text
    (tmp_path / "run.args").write_text(text)
    arguments = parse_arguments([f"@{tmp_path}/run.args"]).arguments
    assert (arguments.algorithm.use_opd, arguments.algorithm.advantage_estimator) == (True, "on_policy_distillation")
    assert arguments.algorithm.policy_loss == "gspo"
    assert (arguments.rewards.custom_rm_path, arguments.rewards.rm_url) == (None, None)
    notes = text.partition("# Not needed here:\n")[2]
    assert "--custom-rm-path and --rm-url change nothing: the teacher is a frozen group of --server-groups" in notes
    assert f"{zeros} is taken as --advantage-estimator on_policy_distillation" in notes
    status, text = migrated(f"{model} {asked} {zeros}")
    assert status == 1
    assert '#   --use-opd: expected a group with role = "frozen" in --server-groups' in text
    status, text = migrated(f"{model} {asked} --custom-reward-post-process-path mine.rewards")
    assert status == 1
    assert "#   --custom-reward-post-process-path does not exist here" in text


@pytest.mark.parametrize(
    ("words", "engines", "model"),
    [
        ("--opd-type megatron --opd-teacher-load /m/Qwen3-8B_torch_dist/", "engines = 1", "/m/Qwen3-8B"),
        ("--opd-type sglang --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2", "engines = 4", "TEACHER"),
        ("--colocate", "engines = 1  # on GPUs of their own: leave out --colocate", "TEACHER"),
        ("--rollout-num-gpus 8 --rollout-num-gpus-per-engine $N", "engines = 1", "TEACHER"),
    ],
)
def test_a_file_with_the_teacher_is_written_out(words: str, engines: str, model: str, migrated: Migrate) -> None:
    status, text = migrated(f"{FINE} --use-opd {words}")
    assert status == 1
    file = text.partition("# A file for --server-groups, with the teacher of --use-opd:\n")[2].splitlines()
    lines = [line.removeprefix("#   ") for line in takewhile(lambda line: line.startswith("#   "), file)]
    assert engines in lines
    groups = tomllib.loads("\n".join(lines).replace("gpus_per_engine = $N", ""))["groups"]
    assert groups["teacher"] == {"role": "frozen", "model": model}


@pytest.mark.parametrize("words", ["", "--use-opd --server-groups fleet.toml"])
def test_no_file_where_nothing_needs_it(words: str, migrated: Migrate) -> None:
    assert "A file for --server-groups" not in migrated(f"{FINE} {words}")[1]
