"""Recipes of verl's supervised trainer become runs with ``--loss-type sft_loss``.

# covers: P8
"""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest

from miles_async.arguments.megatron_fields import as_megatron_flags
from miles_async.arguments.parser import build_parser, parse_arguments
from miles_async.arguments.pass_through import is_pass_through
from miles_async.cli import main
from miles_async.commands.migrate.command import refusals
from miles_async.commands.migrate.verl_sft import DEFAULTS, KEYS, PROGRAM, from_sft, row_of

OURS = list(build_parser("miles-async train")._option_string_actions)
RECIPE = "data.train_files=$HOME/gsm8k/train.parquet model.partial_pretrain=/m"


def test_flags_that_rows_name_exist() -> None:
    texts = [
        word for row in KEYS for word in (row.note, row.flag or "", *(w for ws in row.values.values() for w in ws))
    ]
    of_torchrun = {"--nnodes", "--nproc-per-node"}
    named = {flag for text in texts for flag in re.findall(r"--[a-z][\w-]*\w", text)} - of_torchrun
    unknown = [flag for flag in named if flag not in OURS and not is_pass_through(flag, OURS)]
    assert [flag for flag in unknown if next(as_megatron_flags([flag], OURS)) == flag] == []
    assert [key for key in DEFAULTS if row_of(key) is None] == []


def test_defaults_are_written_out() -> None:
    arguments = parse_arguments(from_sft(RECIPE.split()).words).arguments
    assert arguments.algorithm.supervised
    assert (arguments.data.input_key, arguments.data.label_key) == ("question", "answer")
    assert (arguments.rollout.rollout_batch_size, arguments.rollout.num_epoch) == (256, 4)
    optimizer = arguments.optimizer
    assert (optimizer.lr, optimizer.lr_decay_style, optimizer.lr_warmup_fraction) == (1e-5, "cosine", 0.1)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (0.9, 0.95, 0.01)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("data.prompt_key=extra_info data.prompt_dict_keys=['question'] data.response_key=extra_info "
         "+data.response_dict_keys=['answer']", "--input-key extra_info.question --label-key extra_info.answer"),
        ("data.prompt_key=q data.response_key=a", "--input-key q --label-key a"),
        ("data.train_batch_size=64", "--rollout-batch-size 64"),
        ("trainer.total_epochs=2", "--num-epoch 2"),
        ("model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear", "--lora-rank 32 --lora-alpha 16"),
        ("ulysses_sequence_parallel_size=2", "--context-parallel-size 2"),
        ("trainer.default_local_dir=/c trainer.save_freq=5 trainer.max_ckpt_to_keep=1",
         "--save /c --save-interval 5 --save-keep-last 1"),
        ("trainer.logger=['console','wandb'] trainer.project_name=p", "--use-wandb"),
    ],
)  # fmt: skip
def test_what_keys_become(overrides: str, words: str) -> None:
    done = from_sft(f"{RECIPE} {overrides}".split(), {"nnodes": "1", "nproc-per-node": "8"})
    assert words in " ".join(done.words)
    assert done.unmapped == []
    assert refusals(shlex.join(done.words), {}) == []


def test_chats_have_their_answers_in_them() -> None:
    words = from_sft(f"{RECIPE} data.multiturn.enable=true data.multiturn.messages_key=chat".split()).words
    data = parse_arguments(words).arguments.data
    assert (data.input_key, data.label_key) == ("chat", None)


@pytest.mark.parametrize(
    ("overrides", "absent"),
    [
        ("trainer.total_training_steps=9", "--num-epoch"),
        ("trainer.save_freq=-1", "--save-interval"),
        ("model.lora_rank=0 model.lora_alpha=16 model.target_modules=all-linear", "--lora-alpha"),
        ("optim.lr_warmup_steps_ratio=0", "--lr-warmup-fraction"),
        ("data.val_files=/d/test.parquet", "--eval-prompt-data"),
        ("data.multiturn.messages_key=messages", "messages"),
        ("model.enable_gradient_checkpointing=False", "--recompute-granularity"),
    ],
)
def test_what_is_off_says_nothing(overrides: str, absent: str) -> None:
    done = from_sft(f"{RECIPE} {overrides}".split())
    assert absent not in done.words
    assert done.unmapped == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optim.lr_scheduler=wsd", "expected cosine: others are not implemented: use `--lr-decay-style`"),
        ("data.truncation=left", "an example longer than --max-tokens-per-gpu is skipped"),
        ("data.custom_cls.path=a.py", "data.custom_cls.path=a.py: unknown key"),
    ],
)
def test_what_has_no_counterpart_is_told(override: str, named: str) -> None:
    (problem,) = from_sft(f"{RECIPE} {override}".split()).unmapped
    assert named in problem


def test_a_recipe_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        f"torchrun --standalone --nnodes 2 --nproc_per_node=$N \\\n -m {PROGRAM} {RECIPE} data.micro_batch_size=4 \\\n"
        " trainer.n_gpus_per_node=4 trainer.total_training_steps=1 use_remove_padding=true $@\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(script))
    status = main(["migrate", "-", "--set", "N=4"])
    text = capsys.readouterr().out
    assert status == 0, text
    (tmp_path / "run.args").write_text(text)
    arguments = parse_arguments([f"@{tmp_path}/run.args"]).arguments
    assert (arguments.algorithm.supervised, arguments.rollout.num_rollout) == (True, 1)
    assert "--max-weight-staleness" not in text
    assert (arguments.cluster.actor_num_nodes, arguments.cluster.actor_num_gpus_per_node) == (2, 4)
    assert "trainer.n_gpus_per_node=4: torchrun's --nnodes and --nproc-per-node are --actor-num-nodes" in text
