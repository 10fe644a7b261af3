"""A command line of verl's supervised trainer (0.8) as flags of ``miles-async train``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from miles_async.commands.migrate.verl import Migrated, apply_rows, betas, files, items, note_keys, overrides, trackers
from miles_async.commands.migrate.verl_row import VerlKey, When, choice, is_flag, noted, switch, together

PROGRAM = "verl.trainer.fsdp_sft_trainer"

_ADAPTED = When("model.lora_rank", ("0", None), others=True)
_CHATS = When("data.multiturn.enable", ("True",))
_COLUMNS = "with its dict_keys, by a dot"
_LONG = "an example longer than --max-tokens-per-gpu is skipped"
_PACKED = "samples are packed: --max-tokens-per-gpu is the size of a micro-batch"
_RANKS = "torchrun's --nnodes and --nproc-per-node are --actor-num-nodes and --actor-num-gpus-per-node"
_LAUNCHED = {"nnodes": "--actor-num-nodes", "nproc-per-node": "--actor-num-gpus-per-node"}

DEFAULTS = {
    "data.train_batch_size": "256",
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.multiturn.messages_key": "messages",
    "model.enable_gradient_checkpointing": "True",
    "optim.lr": "1e-5",
    "optim.betas": "[0.9,0.95]",
    "optim.weight_decay": "0.01",
    "optim.lr_warmup_steps_ratio": "0.1",
    "optim.lr_scheduler": "cosine",
    "trainer.total_epochs": "4",
}
"""verl's defaults (trainer/config/sft_trainer.yaml) that differ from ours."""

KEYS: tuple[VerlKey, ...] = (
    together("data.train_files", "is `--prompt-data`"),
    noted("data.val_files", "--loss-type sft_loss evaluates nothing"),
    is_flag("data.train_batch_size", "--rollout-batch-size"),
    *(together(f"data.{key}", f"is `{flag}`, {_COLUMNS}")
      for key, flag in (("prompt_key", "--input-key"), ("response_key", "--label-key"))),
    *(together(f"data.{key}_dict_keys", f"with {key}_key") for key in ("prompt", "response")),
    together("data.multiturn.enable", "True is `--label-key none`: the answers are the assistant's messages"),
    is_flag("data.multiturn.messages_key", "--input-key", _CHATS),
    *(noted(f"data.{key}", _PACKED) for key in ("micro_batch_size", "micro_batch_size_per_gpu", "balance_dp_token")),
    noted("data.max_length", _LONG),
    noted("data.truncation", _LONG, "error"),
    is_flag("model.partial_pretrain", "--hf-checkpoint"),
    switch("model.enable_gradient_checkpointing", "--recompute-granularity", "full",
            note="True is `--recompute-granularity full`"),
    switch("model.trust_remote_code", "--trust-remote-code"),
    is_flag("model.lora_rank", "--lora-rank"),
    is_flag("model.lora_alpha", "--lora-alpha", _ADAPTED),
    is_flag("model.target_modules", "--target-modules", _ADAPTED, all="all-linear"),
    *(noted(key, "Megatron trains, on packed samples") for key in
      ("model.strategy", "model.fsdp_config.*", "model.use_liger", "use_remove_padding")),
    is_flag("optim.lr", "--lr"),
    together("optim.betas", "are `--adam-beta1` and `--adam-beta2`"),
    is_flag("optim.weight_decay", "--weight-decay"),
    is_flag("optim.clip_grad", "--clip-grad"),
    is_flag("optim.lr_warmup_steps_ratio", "--lr-warmup-fraction", none="0", no="0.0"),
    choice("optim.lr_scheduler", "others are not implemented: use `--lr-decay-style`",
           cosine="--lr-decay-style cosine"),
    is_flag("ulysses_sequence_parallel_size", "--context-parallel-size"),
    *(noted(f"trainer.{key}", _RANKS) for key in ("nnodes", "n_gpus_per_node")),
    is_flag("trainer.total_training_steps", "--num-rollout", unset="None"),
    together("trainer.total_epochs", "is `--num-epoch`, without total_training_steps"),
    is_flag("trainer.default_local_dir", "--save"),
    is_flag("trainer.save_freq", "--save-interval", unset="-1"),
    is_flag("trainer.max_ckpt_to_keep", "--save-keep-last", unset="None"),
    noted("trainer.checkpoint.*", "a checkpoint holds all that training needs; --save-hf exports weights"),
    noted("trainer.resume_mode", "auto is --load with the directory of --save; --max-run-restarts restarts a run"),
    is_flag("trainer.resume_from_path", "--load", unset="None"),
    noted("trainer.test_freq", "--loss-type sft_loss evaluates nothing"),
    is_flag("trainer.seed", "--seed"),
    together("trainer.logger", "as of verl's other programs"),
    is_flag("trainer.project_name", "--wandb-project"),
    is_flag("trainer.experiment_name", "--wandb-group"),
    noted("trainer.device", "--device says where models run"),
)  # fmt: skip


def row_of(key: str) -> VerlKey | None:
    """The row of a key; None if verl's recipes were not seen to use it."""
    for row in KEYS:
        if row.key == key or (row.key.endswith(".*") and key.startswith(row.key.removesuffix("*"))):
            return row
    return None


def from_sft(words: Sequence[str], launched: Mapping[str, str] | None = None) -> Migrated:
    """Translate the words after ``PROGRAM``. verl's defaults that differ from ours are written out.

    ``launched``: torchrun's own flags → their values.
    """
    given = dict(overrides(words))
    values = DEFAULTS | given
    done = Migrated(words=["--loss-type", "sft_loss", "--n-samples-per-prompt", "1"])
    done.words += [word for flag, value in (launched or {}).items() for word in (_LAUNCHED[flag], value)]
    noted = apply_rows(values, {key: key for key in given}, row_of, done)
    done.words += [*files("--prompt-data", values.get("data.train_files", "None")), *_columns(values)]
    if values.get("trainer.total_training_steps", "None") == "None":
        done.words += ["--num-epoch", values["trainer.total_epochs"]]
    done.words += [*betas(values["optim.betas"]), *trackers(values.get("trainer.logger", ""))]
    note_keys(noted, done)
    return done


def _columns(values: Mapping[str, str]) -> Iterator[str]:
    """Yield flags for the columns of questions and answers."""
    if values.get("data.multiturn.enable") == "True":
        yield from ("--label-key", "none")
        return
    for key, flag in (("prompt", "--input-key"), ("response", "--label-key")):
        inner = values.get(f"data.{key}_dict_keys", "None")
        yield from (flag, ".".join([values[f"data.{key}_key"], *(items(inner) if inner != "None" else [])]))
