"""Check the flags of on-policy distillation: there is a teacher, and it has the student's vocabulary (C12)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.model_files import directory_problems, read_config, read_json
from miles_async.arguments.server_groups import teacher_group
from miles_async.errors import ConfigurationError

SCORED_BESIDES = 7  # tokens of its context that SGLang (0.5) leaves free when it scores


def check_distillation(arguments: Arguments) -> Iterator[str]:
    """Check that --use-opd has a teacher and an effect."""
    algorithm = arguments.algorithm
    if not algorithm.use_opd:
        if algorithm.advantage_estimator == "on_policy_distillation":
            yield "--advantage-estimator on_policy_distillation leaves learning to a teacher: add --use-opd"
        return
    if algorithm.opd_kl_coef == 0 and ":" not in algorithm.policy_loss:
        yield "--use-opd with --opd-kl-coef 0 has no effect: set the coefficient, or remove both"
    if (temperature := arguments.rollout.rollout_temperature) != 1:
        yield (
            f"--use-opd with --rollout-temperature {temperature:g}: the teacher's log-probs are at temperature 1, and "
            "the student would become like it at another one: use 1"
        )
    if algorithm.m2_threshold is not None:
        yield "--m2-threshold leaves tokens out that --use-opd would still teach: give one of them"
    if algorithm.policy_loss in ("clip_cov", "kl_cov"):
        yield f"--policy-loss {algorithm.policy_loss} chooses tokens by advantages that --use-opd changes: use another"
    if arguments.debug.sides != "trainer":
        yield from _check_teacher(arguments)


def _check_teacher(arguments: Arguments) -> Iterator[str]:
    try:
        teacher = teacher_group(arguments)
    except ConfigurationError as error:
        yield str(error)
        return
    where = f"--use-opd, [groups.{teacher.name}]"
    if teacher.external:
        yield f"{where}: external engines don't show their tokenizer, which has to be the student's: use model"
        return
    student = arguments.model.hf_checkpoint
    if teacher.model is None or student is None:
        return  # it is the student's own checkpoint
    model = Path(teacher.model)
    if problems := list(directory_problems(model, f"{where}: model")):
        yield from problems
        return
    if (why := vocabulary_difference(student, model)) is not None:
        yield f"{where}: the student's tokens are not the teacher's: {why}; choose a teacher with the same tokenizer"
    longest = arguments.longest_sample
    positions = read_config(model).get("max_position_embeddings")
    if isinstance(positions, int) and longest + SCORED_BESIDES > positions:
        yield (
            f"{where}: prompt and response may have {longest} tokens, and {SCORED_BESIDES} have to be left of the "
            f"teacher's max_position_embeddings {positions}: lower --rollout-max-response-len or "
            "--rollout-max-prompt-len"
        )


FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
"""Files that define which token an id stands for; one is enough."""


def has_vocabulary(directory: Path) -> bool:
    """True if there is a file that :func:`vocabulary_difference` compares."""
    return any((directory / name).is_file() for name in FILES)


def vocabulary_difference(student: Path, teacher: Path) -> str | None:
    """Why ids of the student's tokenizer would mean something else to the teacher; None if they don't.

    The teacher's may have more tokens. Other files than tokenizer.json are compared as a whole.
    """
    known, given = _tokens(student), _tokens(teacher)
    if known and given:
        for token, number in known.items():
            if given.get(token) != number:
                there = "no such token" if token not in given else f"id {given[token]}"
                return f"expected id {number} for {token!r} in {teacher / FILES[0]}, found {there}"
        return None
    for name in FILES[1:]:
        ours, theirs = _content(student / name), _content(teacher / name)
        if ours is not None and theirs is not None:
            return None if ours == theirs else f"{name} differs between {student} and {teacher}"
    return f"expected one of {', '.join(FILES)} in both {student} and {teacher} to compare, found none"


def _tokens(directory: Path) -> Mapping[str, int]:
    """Token → id, by tokenizer.json; empty if there is none."""
    content = read_json(directory / FILES[0])
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of a unigram model: [token, score] by id
        vocabulary = {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
