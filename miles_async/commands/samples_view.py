"""Samples as text for a terminal. What models and tools wrote is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from miles_async.commands.tables import printed
from miles_async.runtime.texts import escaped
from miles_async.samples.columns import LOSS, MASK_REASONS, SampleRow, SampleSummary

NONE = "–"
TOKENS_WIDTH = 150  # columns that all figures of a token need
PROMPT_SHOWN = 30  # characters of a prompt's end
RESPONSE_SHOWN = 2000  # characters of a response in a table's row before the terminal's width cuts it


def summary_table(rows: Sequence[SampleSummary]) -> str:
    """A line per row, numbered from 1."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)  # else a long text narrows all columns alike
    for heading in ("row", "step", "group.sample", "reward", "adv.", "tokens", "age", "end"):
        table.add_column(heading, justify="left" if heading == "end" else "right", no_wrap=True)
    table.add_column("prompt → response", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, row in enumerate(rows, start=1):
        place = f"{row.attempt_id}.{row.sample}" + (f".{row.branch}" if row.branches > 1 else "")
        step = f"{row.step}" if row.kind == "train" else f"eval {row.step} {row.data_set}"
        end = "filtered" if row.filtered is not None else row.finish_reason
        table.add_row(
            *map(Text, (f"{number}", escaped(step), place, _number(row.reward), _number(row.advantage))),
            *map(Text, (f"{row.length}", NONE if row.age is None else f"{row.age}", end)),
            Text(escaped(f"{row.prompt[-PROMPT_SHOWN:]} → {row.response[:RESPONSE_SHOWN]}")),
        )
    return printed(table)


def conversation(row: SampleRow) -> str:
    """Facts about a sample, and its messages, or prompt and response."""
    lines = [*_facts(row), ""]
    for role, text in row.conversation():
        lines += [f"── {escaped(role)} " + "─" * 20, escaped(text, keep="\n\t"), ""]
    return "\n".join(lines)


def token_table(row: SampleRow) -> str:
    """A line per token."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    optional = {
        "advantage": row.advantages,
        "trainer": row.trainer_logprobs,
        "teacher": row.teacher_logprobs,
        "entropy": row.entropies,
        "reward": row.token_rewards,
    }
    shown = {name: values for name, values in optional.items() if values is not None}
    for heading in ("#", "id", "version", "age", "log-prob", *shown):
        table.add_column(heading, justify="right", no_wrap=True)
    differs = row.trainer_logprobs is not None and row.oldest_version is not None
    if differs:
        table.add_column("engine − trainer", justify="right", no_wrap=True)
    table.add_column("no loss because", no_wrap=True)
    table.add_column("token", no_wrap=True, overflow="ellipsis")
    for index, (age, version) in enumerate(zip(row.ages(), row.weight_versions, strict=True)):
        loss = row.mask_reasons[index] == LOSS
        known = loss and row.oldest_version is not None  # examples have no engine
        cells = [f"{index}", f"{row.tokens[index]}", NONE if version < 0 else f"{version}"]
        cells += [NONE if age is None else f"{age}", _number(row.rollout_logprobs[index] if known else None)]
        cells += [_number(values[index] if loss else None) for values in shown.values()]
        if differs and (trainer := row.trainer_logprobs) is not None:
            cells.append(_number(row.rollout_logprobs[index] - trainer[index] if loss else None))
        reason = "" if loss else MASK_REASONS[row.mask_reasons[index]]
        table.add_row(*map(Text, cells), Text(reason), Text(escaped(row.token_texts[index])))
    return "\n".join(_facts(row)) + "\n" + printed(table, least=TOKENS_WIDTH)


def _facts(row: SampleRow) -> Iterator[str]:
    where = f"step {row.step}" if row.kind == "train" else f"evaluation after {row.step} steps, {row.data_set}"
    branch = f", branch {row.branch} of {row.branches}" if row.branches > 1 else ""
    yield escaped(f"{where}, group {row.attempt_id} of prompt {row.prompt_id}, sample {row.sample}{branch}")
    reward = f"reward {_number(row.reward)}" + (f" {row.reward_parts}" if row.reward_parts else "")
    yield escaped(f"{reward}, label {NONE if row.label is None else row.label}, advantage {_number(row.advantage)}")
    versions = f"versions {row.oldest_version} to {row.newest_version}, trained from {row.target_version}"
    age = "" if row.age is None else f", age {row.age}"
    yield f"{row.prompt_length} + {row.length} tokens, {row.loss_tokens} with loss; ended by {row.finish_reason}"
    if row.oldest_version is not None:
        yield versions + age if row.target_version is not None else versions.partition(",")[0]
    if row.filtered is not None:
        yield escaped(f"not trained: {row.filtered}")
    if seconds := [turn.seconds for turn in row.turns if turn.seconds is not None]:
        yield f"{len(row.turns)} turns, {sum(seconds):.2f} s of generation"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"
