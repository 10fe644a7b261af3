"""Flags of slime and miles whose meaning depends on others of the script, or that the environment has here."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_async.arguments.cluster import FORWARDED
from miles_async.arguments.foreign.slime import ENVIRONMENT
from miles_async.arguments.foreign.translate import Translation, mentions, same
from miles_async.runtime.environment import is_secret

CONVERTED = "_torch_dist"
"""Ends the name of a checkpoint that slime's and miles' tools converted."""

_QUANTIZED = re.compile(r"[-_](fp8|int4|nvfp4|mxfp4|mxfp8|w4a16|w8a8)$", re.IGNORECASE)
_VARIABLES = "--train-env-vars"
_REWARD, _REWARDS = "--custom-rm-path", "--custom-reward-post-process-path"
_TEACHERS = tuple(f"{system}.rollout.on_policy_distillation" for system in ("slime", "miles"))
"""Modules with a reward that asks a teacher for log-probs, and makes all rewards 0 afterwards."""
_ONE_STEP = "--use-dynamic-global-batch-size"

Scripted = Mapping[str, Sequence[str]]
"""Flag → its values in the script."""


def work_out(translation: Translation, scripted: Scripted) -> list[str]:
    """Make notes of flags that the script's others leave without effect, or say by themselves.

    Returns what is to be set in the environment.
    """
    remarks = _about_the_reference(translation, scripted)
    if scripted.get("--rm-type") == ("dapo",):
        remarks |= dict.fromkeys(("--reward-key", "--eval-reward-key"), "changes nothing: a reward is a number")
    if _ONE_STEP in scripted and scripted.get("--num-steps-per-rollout", ("1",)) == ("1",):
        remarks[_ONE_STEP] = (
            "is one optimizer step per rollout batch, as without --global-batch-size, which is left out"
        )
        _leave_out(translation, "--global-batch-size")
    remarks |= _about_the_teacher(translation, scripted)
    for flag, remark in remarks.items():
        if translation.problems.pop(flag, None) is not None:
            translation.notes[flag] = f"{' '.join((flag, *scripted[flag]))} {remark}"
    if {"--num-epoch", "--num-rollout"} <= set(scripted):
        _leave_out(translation, "--num-epoch")
        translation.notes["--num-epoch"] = "--num-epoch changes nothing: --num-rollout is given, and wins"
    environment = [name for flag, name in ENVIRONMENT.items() if translation.problems.pop(f"--{flag}", None)]
    return environment + _variables(translation, scripted)


def _about_the_reference(translation: Translation, scripted: Scripted) -> dict[str, str]:
    """Flag → remark on ``--ref-load``, from which theirs start, and to which their KL refers."""
    model, reference = ((*scripted.get(flag, ()), "")[0] for flag in ("--hf-checkpoint", "--ref-load"))
    name, converted = Path(model).name, Path(reference).name.removesuffix(CONVERTED)
    if (form := _QUANTIZED.search(name)) and form[1].lower() == "fp8":
        translation.words += ["--rollout-quantization", "fp8"]
        translation.notes["--hf-checkpoint"] = (
            f"--hf-checkpoint {model} is, by its name, in float8: engines generate with it, and training starts from "
            "it, in bf16; give the directory in bf16 to start from more precise weights"
        )
        name = name[: form.start()]
    elif reference and form and not _QUANTIZED.search(converted):
        translation.problems["--ref-load"] = (
            f"--ref-load {reference} is, by its name, in bf16 what engines read in 4 bits from --hf-checkpoint "
            f"{model}: here trainer and engines share one model, in bf16: give --hf-checkpoint the directory that was "
            "converted"
        )
        return {}
    in_reward, in_loss = (
        not same(" ".join(scripted.get(flag, ("0",))), "0") for flag in ("--kl-coef", "--kl-loss-coef")
    )
    if "--use-kl-loss" not in scripted and not in_reward:
        remark = "changes nothing: without a KL there is no reference, and the run starts from --hf-checkpoint"
        return dict.fromkeys(("--ref-load", "--ref-ckpt-step"), remark)
    if model and converted == name:
        translation.words += ["--ref-hf-checkpoint", model]
        return {"--ref-load": f"is taken as --ref-hf-checkpoint {model}: by its name, it is the same model, converted"}
    if not in_reward and not in_loss:
        remark = "changes nothing: with coefficient 0 the KL to --hf-checkpoint, where the run starts, is only logged"
        return dict.fromkeys(("--ref-load", "--ref-ckpt-step"), remark)
    return {}


def _about_the_teacher(translation: Translation, scripted: Scripted) -> dict[str, str]:
    """Flag → remark, for a reward that asks a teacher at --rm-url."""
    paths = scripted.get(_REWARD), scripted.get(_REWARDS)
    asks = any(paths == ((f"{module}.reward_func",), (f"{module}.post_process_rewards",)) for module in _TEACHERS)
    if "--use-opd" not in scripted or not asks:
        return {}
    for flag in (_REWARD, "--rm-url", "--advantage-estimator"):
        _leave_out(translation, flag)
    translation.words += ["--advantage-estimator", "on_policy_distillation"]
    translation.notes[_REWARD] = (
        f"{_REWARD} and --rm-url change nothing: the teacher is a frozen group of --server-groups (docs/algorithms.md "
        "has an example), with the model that the server at --rm-url has"
    )
    return {_REWARDS: "is taken as --advantage-estimator on_policy_distillation: all rewards are 0"}


def teacher_file(given: Scripted, scripted: Scripted) -> list[str]:
    """Lines of a file for --server-groups with a teacher, if the run lacks one. ``given``: our flag → its values."""
    if "--use-opd" not in given or "--server-groups" in given:
        return []
    (gpus, *_), (size, *_) = (
        given.get(flag) or ("1",) for flag in ("--rollout-num-gpus", "--rollout-num-gpus-per-engine")
    )
    engines = int(gpus) // int(size) if gpus.isdigit() and size.isdigit() and int(size) else 1
    teacher = " ".join(scripted.get("--opd-teacher-load", ())).rstrip("/").removesuffix(CONVERTED)
    return [
        "[groups.train]",
        f"engines = {max(1, engines)}" + ("  # on GPUs of their own: leave out --colocate" * ("--colocate" in given)),
        f"gpus_per_engine = {size}",
        "[groups.teacher]",
        'role = "frozen"',
        f"model = {json.dumps(teacher or 'TEACHER')}  # its Hugging Face directory",
    ]


def _leave_out(translation: Translation, left_out: str) -> None:
    found = mentions(translation.words)
    translation.words = [
        word for flag, values in found if flag.partition("=")[0] != left_out for word in (flag, *values) if word
    ]


def _variables(translation: Translation, scripted: Scripted) -> list[str]:
    """The variables of ``--train-env-vars``: NAME=VALUE, or the name of a secret. All of them are forwarded."""
    try:
        variables = json.loads(" ".join(scripted.get(_VARIABLES, ("{}",))))
    except ValueError:
        return []
    if not isinstance(variables, dict) or translation.problems.pop(_VARIABLES, None) is None:
        return []
    more = [name for name in variables if not any(fnmatch.fnmatch(name, pattern) for pattern in FORWARDED)]
    if more:
        translation.words += ["--forward-env", *FORWARDED, *more]
    return [name if is_secret(name, str(value)) else f"{name}={value}" for name, value in variables.items()]
