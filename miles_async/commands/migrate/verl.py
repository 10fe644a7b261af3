"""A command line of verl, ``key=value`` words of Hydra and the file of its ``--config-name``, as flags of
``miles-async train``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.arguments.foreign import FOREIGN_FLAGS
from miles_async.arguments.foreign.translate import same
from miles_async.commands.migrate.verl_config import as_written, configuration
from miles_async.commands.migrate.verl_defaults import DEFAULTS, FULLY_ASYNC_DEFAULTS
from miles_async.commands.migrate.verl_keys import WARM_UPS, older_name, row_of
from miles_async.commands.migrate.verl_row import VerlKey

FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
PROGRAMS = (
    "verl.trainer.main_ppo",
    "recipe.dapo.main_dapo",
    FULLY_ASYNC,
    "verl.experimental.one_step_off_policy.main_ppo",
    "verl.experimental.transfer_queue.main_ppo",
)
TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio", "swanlab")
"""verl's names of trackers that are ours, too."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs", "low_var_kl": "low_var_kl", "k3": "k3"}
_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
_COMPARING = ("grpo", "rloo", "reinforce_plus_plus_baseline")
_NEVER = ("-1", "0")
_AS_FLAGS = {  # subtree → beginning of our flag
    f"{_ACTOR}.megatron.override_transformer_config.": "--",
    f"{_ACTOR}.megatron.override_ddp_config.": "--",
    f"{_ACTOR}.optim.override_optimizer_config.": "--",
    f"{_ROLLOUT}.engine_kwargs.sglang.": "--sglang-",
}


FindRow = Callable[[str], VerlKey | None]
"""Key → its row in a table."""


@dataclass(kw_only=True, slots=True)
class Migrated:
    """The flags of a recipe, sorted by what becomes of them."""

    words: list[str] = field(default_factory=list)  # for our parser
    not_needed: list[str] = field(default_factory=list)  # with reasons
    unmapped: list[str] = field(default_factory=list)  # with reasons
    checked: list[str] = field(default_factory=list)  # flags that config.json or another flag answers


def from_verl(words: Sequence[str], program: str = PROGRAMS[0], directory: Path | None = None) -> Migrated:
    """Translate the words after the name of ``program``. verl's defaults that differ from ours are written out.

    ``directory``: the script's, to find the file of ``--config-name`` in its checkout.
    """
    configured, missing = configuration(words, directory or Path.cwd())
    deleted = {word[1:].partition("=")[0] for word in words if word.startswith("~")}
    configured = [(key, value) for key, value in configured if not _is_in(key, deleted)]
    typed = [*configured, *overrides(words)]
    names = {older_name(key): key for key, _ in typed}
    given = {older_name(key): value for key, value in typed}
    values = _in_steps({**DEFAULTS, **FULLY_ASYNC_DEFAULTS, **given}) if program == FULLY_ASYNC else DEFAULTS | given
    done = Migrated(unmapped=missing)
    noted = apply_rows(values, names, row_of, done, configured)
    _several(values, done)
    if program == FULLY_ASYNC and "trainer.total_epochs" in given:
        noted["fewer prompts than rollout.total_rollout_steps end the run earlier: lower --num-rollout then"] = [
            f"trainer.total_epochs={given['trainer.total_epochs']}"
        ]
    note_keys(noted, done)
    return done


def apply_rows(
    values: Mapping[str, str],
    names: Mapping[str, str],
    find: FindRow,
    done: Migrated,
    configured: Sequence[tuple[str, str]] = (),
) -> dict[str, list[str]]:
    """Sort keys by what their rows say. Returns note → keys without effect.

    ``names``: key → as it was given, without defaults. ``configured``: (key, value) of a file.
    """
    noted = dict[str, list[str]]()
    for key, value in values.items():
        row, shown = find(key), f"{names.get(key, key)}={value}"
        if row is None:
            done.unmapped.append(f"{shown}: unknown key")
        elif not _counts(row, values, find):
            if key in names:
                noted.setdefault(f"no effect without {row.when}", []).append(shown)
        elif row.verdict == "noted" and (not row.only or value in row.only):
            noted.setdefault(row.note, []).append(shown)
        elif "${" in value and (names.get(key), value) in configured:
            done.unmapped.append(f"{shown}: write the value that it refers to")
        elif row.verdict != "works" and (row.verdict == "noted" or value != "None"):
            done.unmapped.append(f"{shown}: {row.note}")
        elif row.flag is not None or row.values:
            _one(row, value, done, shown)
    return noted


def note_keys(noted: Mapping[str, Sequence[str]], done: Migrated) -> None:
    """Report keys without effect, those with the same note together."""
    done.not_needed += [f"{', '.join(keys)}: {note}" for note, keys in noted.items()]


def _counts(row: VerlKey, values: Mapping[str, str], find: FindRow) -> bool:
    """True unless other keys leave ``row``, or a key that it depends on, without effect."""
    if row.when is None:
        return True
    condition = find(row.when.key)
    return row.when.holds(values) and (condition is None or _counts(condition, values, find))


def _in_steps(values: Mapping[str, str]) -> dict[str, str]:
    """``values`` of the fully asynchronous trainer with the meanings that keys have elsewhere, in training steps.

    A step takes require_batches mini-batches there; checkpoints and evaluations are counted in publications.
    """
    published = values["async_training.trigger_parameter_sync_step"]
    batch = _product(values[f"{_ACTOR}.ppo_mini_batch_size"], values["async_training.require_batches"])
    done = {**values, "data.train_batch_size": batch}
    frequencies = {
        "trainer.save_freq": values.get("trainer.save_freq", "-1"),
        "trainer.test_freq": values.get("rollout.test_freq", values.get("trainer.test_freq", "-1")),
    }
    done |= {key: value if value in _NEVER else _product(value, published) for key, value in frequencies.items()}
    prompts = values["rollout.total_rollout_steps"]
    if prompts.isdigit() and batch.isdigit() and int(batch):
        done["trainer.total_training_steps"] = str(int(prompts) // int(batch))
    return done


def _product(*factors: str) -> str:
    """The product, or its terms if only the shell knows one."""
    known = all(factor.isdigit() for factor in factors)
    return str(math.prod(map(int, factors))) if known else "*".join(factors)


def overrides(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of Hydra's overrides, without its own flags and ``~key``."""
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and not key.startswith(("-", "~")):
            yield key, as_written(value.strip().strip("'\""))


def _is_in(key: str, subtrees: Collection[str]) -> bool:
    return any(key == subtree or key.startswith(f"{subtree}.") for subtree in subtrees)


def _one(row: VerlKey, value: str, done: Migrated, shown: str) -> None:
    """A key that stands for itself; ``shown``: as it was typed."""
    if value in row.values:
        done.words += row.values[value]
    elif row.flag is None:
        done.unmapped.append(f"{shown}: expected {', '.join(filter(None, row.values))}: {row.note}")
    else:
        done.words += [row.flag, *items(value)]


def _several(values: Mapping[str, str], done: Migrated) -> None:
    """Keys that are worked out together."""
    done.words += [*files("--prompt-data", values.get("data.train_files", "None")),
                   *files("--eval-prompt-data", values.get("data.val_files", "None"))]  # fmt: skip
    for words in (_images, _gpus, _losses, _saving):
        done.words += words(values)
    _optimizer_steps(values, done)
    _groups_of_one(values, done)
    _kl_in_reward(values, done)
    _critic_alone(values, done)
    _deadline(values, done)
    if values.get("trainer.total_training_steps", "None") == "None":
        key = "rollout.total_rollout_steps"
        if (row := row_of(key)) is not None and key in values:
            done.unmapped.append(f"{key}={values[key]}: {row.note.replace('`', '')}")
        else:
            done.words += ["--num-epoch", values["trainer.total_epochs"]]
    done.words += [*betas(values[f"{_ACTOR}.optim.betas"]), *trackers(values.get("trainer.logger", ""))]
    for key, value in values.items():
        beginning = next((start for start in _AS_FLAGS if key.startswith(start)), None)
        if beginning is not None and (row := row_of(key)) is not None and row.key.endswith(".*"):
            done.words += _as_flag(_AS_FLAGS[beginning] + key.removeprefix(beginning).replace("_", "-"), value)


def betas(value: str) -> list[str]:
    """Flags for Adam's betas."""
    first, second = (*items(value), "", "")[:2]
    return ["--adam-beta1", first, "--adam-beta2", second]


def trackers(value: str) -> list[str]:
    """Flags for the loggers of a list that exist here."""
    named = items(value)
    return [f"--use-{tracker}" for tracker in TRACKERS if tracker in named]


def _optimizer_steps(values: Mapping[str, str], done: Migrated) -> None:
    """Optimizer steps per rollout batch, and warm-ups, which are counted in them here and in rollout batches there."""
    batch, mini, steps = values["data.train_batch_size"], values[f"{_ACTOR}.ppo_mini_batch_size"], ""
    if batch.isdigit() and mini.isdigit() and int(mini) and int(batch) % int(mini) == 0:
        steps = str(int(batch) // int(mini))
        done.words += ["--num-steps-per-rollout", steps]
    else:
        done.unmapped.append(
            f"{_ACTOR}.ppo_mini_batch_size={mini} of data.train_batch_size={batch}: give --num-steps-per-rollout, how "
            "many of the first are in the second"
        )
    for key, (flag, when) in WARM_UPS.items():
        warm_up = values.get(key, "-1")
        if warm_up in (*_NEVER, "None") or (when is not None and not when.holds(values)):
            continue
        if steps:
            done.words += [flag, _product(warm_up, steps, values.get(f"{_ACTOR}.ppo_epochs", "1"))]
        else:
            done.unmapped.append(f"{key}={warm_up}: give {flag}, this times --num-steps-per-rollout and --ppo-epochs")


def files(flag: str, value: str) -> Iterator[str]:
    """Yield ``flag`` and its files, each after the name of its folder if another file has the same name."""
    found = [file for file in items(value) if file != "None"]
    names = [Path(file).name for file in found]
    if found:
        yield flag
    for file in found:
        folder = Path(file).parent.name
        yield from (folder, file) if folder and names.count(Path(file).name) > 1 else (file,)


def _images(values: Mapping[str, str]) -> Iterator[str]:
    if (column := values.get("data.image_key", "None")) != "None":
        yield from ("--multimodal-keys", json.dumps({"image": column}))


def _gpus(values: Mapping[str, str]) -> Iterator[str]:
    yield from ("--actor-num-nodes", values["trainer.nnodes"])
    yield from ("--actor-num-gpus-per-node", values["trainer.n_gpus_per_node"])
    nodes = values.get("rollout.nnodes", values["trainer.nnodes"])
    gpus = values.get("rollout.n_gpus_per_node", values["trainer.n_gpus_per_node"])
    yield from ("--rollout-num-gpus", _product(nodes, gpus))


def _losses(values: Mapping[str, str]) -> Iterator[str]:
    if values.get(f"{_ACTOR}.use_kl_loss") == "True":
        kind = values.get(f"{_ACTOR}.kl_loss_type", "low_var_kl")
        yield from ("--use-kl-loss", "--kl-loss-coef", values.get(f"{_ACTOR}.kl_loss_coef", "0.001"))
        yield from ("--kl-loss-type", _KL.get(kind, kind))
    if values.get(f"{_OVERLONG}.enable") == "True":
        yield from ("--overlong-buffer-len", values.get(f"{_OVERLONG}.len", "0"))
        yield from ("--overlong-penalty-factor", values.get(f"{_OVERLONG}.penalty_factor", "1.0"))


def _groups_of_one(values: Mapping[str, str], done: Migrated) -> None:
    """With one answer per prompt, verl's estimators that compare answers leave the rewards as they are."""
    estimator = values["algorithm.adv_estimator"]
    if values[f"{_ROLLOUT}.n"] != "1" or estimator not in _COMPARING:
        return
    done.words[done.words.index("--advantage-estimator") + 1] = "reinforce"
    done.words = [word for word in done.words if word != "--no-grpo-std-normalization"]
    done.not_needed.append(
        f"algorithm.adv_estimator={estimator} is taken as --advantage-estimator reinforce: with one answer per prompt "
        "its advantage is the reward"
    )


def _kl_in_reward(values: Mapping[str, str], done: Migrated) -> None:
    """A KL of each token. Estimators that compare samples by their rewards would have to know it before."""
    estimator, kind = values["algorithm.adv_estimator"], values.get("algorithm.kl_penalty", "kl")
    coefficient = values.get("algorithm.kl_ctrl.kl_coef", "0.001")
    if values.get("algorithm.use_kl_in_reward") != "True" or same(coefficient, "0"):
        return
    if estimator not in ("gae", "reinforce_plus_plus"):
        done.unmapped.append(
            f"algorithm.use_kl_in_reward=True with algorithm.adv_estimator={estimator}: verl takes the KL off the "
            "rewards before they are compared, here it is taken off each token's advantage: give --use-kl-loss "
            "--kl-loss-coef in its place"
        )
        return
    if estimator == "reinforce_plus_plus":  # gae takes the coefficient itself
        done.words += ["--token-advantages", "kl_in_reward"]
    done.words += ["--kl-coef", coefficient, "--kl-reward-type", _KL.get(kind, kind)]


def _critic_alone(values: Mapping[str, str], done: Migrated) -> None:
    """The policy is trained from step critic_warmup on, and the first step is 1."""
    key, estimator = "trainer.critic_warmup", values["algorithm.adv_estimator"]
    if estimator != "gae" or (first := values.get(key, "0")) in ("0", "1"):
        return
    if first.isdigit():
        done.words += ["--num-critic-only-steps", str(int(first) - 1)]
    else:
        done.unmapped.append(f"{key}={first}: give --num-critic-only-steps, this minus 1")


def _deadline(values: Mapping[str, str], done: Migrated) -> None:
    key = "actor_rollout_ref.nccl_timeout"
    if (seconds := values.get(key, "None")).isdigit():
        done.words += ["--distributed-timeout-minutes", f"{int(seconds) / 60:g}"]
    elif seconds != "None":
        done.unmapped.append(f"{key}={seconds}: give --distributed-timeout-minutes, this over 60")


def _saving(values: Mapping[str, str]) -> Iterator[str]:
    """Nothing is saved, and nothing kept, without save_freq."""
    if (interval := values.get("trainer.save_freq", "-1")) in _NEVER:
        return
    names = values.get("trainer.project_name", "verl"), values.get("trainer.experiment_name", "run")
    yield from ("--save", values.get("trainer.default_local_dir", f"checkpoints/{'/'.join(names)}"))
    yield from ("--save-interval", interval)
    if (kept := values.get("trainer.max_actor_ckpt_to_keep", "None")) != "None":
        yield from ("--save-keep-last", kept)


def _as_flag(flag: str, value: str) -> list[str]:
    """Words ``--x value``; a switch is ``--x``, and None gives no words."""
    row = FOREIGN_FLAGS.get(flag)
    is_switch = (row is not None and row.takes == "nothing") or flag.startswith("--sglang-")
    off = [] if is_switch else [flag, "false"]
    return {"True": [flag], "False": off, "None": []}.get(value, [flag, *items(value)])


def items(value: str) -> list[str]:
    """Items of a list, ``[a,'b']``; of anything else the value alone."""
    if not (value.startswith("[") and value.endswith("]")):
        return [value]
    return [item for part in value[1:-1].split(",") if (item := part.strip().strip("'\""))]
