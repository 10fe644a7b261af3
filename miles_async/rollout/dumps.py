"""Batches of rollout data in Parquet files, one per step: for notebooks, and to train on them again.

Files of ``--save-samples`` have nearly the same columns and another writer, since they are for people: a share of the
groups, behind a queue that may drop, with texts of tokens and metadata as shown. A dump is whole before its batch is
trained on, is read back exactly, and has experts.

A row is one branch of a sample (nearly always: one sample). Whatever reads Parquet reads them::

    rows = pandas.read_parquet("dumps/17.parquet")
    rows.groupby("prompt_id")["reward"].mean()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from miles_async.errors import DataError
from miles_async.types import Attempt, Branch, FinishReason, Float32, Group, Int32, Label, Prompt, RoutedExperts, Sample

if TYPE_CHECKING:
    import pyarrow

PER_TOKEN: Mapping[str, npt.DTypeLike] = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "rollout_logprobs": np.float32,
    "weight_versions": np.int32,
}
"""Columns with an array per row; see ``types.Branch``."""

EXPERTS = "routed_experts"
"""Column of ``Branch.routed_experts``, flat; absent where no engine reported them."""


TEACHER, REWARDS = "teacher_logprobs", "token_rewards"
"""Columns of ``Branch`` by the same names: absent without a teacher or rewards per token."""


class RolloutDump(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout data of one step."""

    rollout_id: int  # the step, from 1
    target_version: int  # the optimizer steps from it (C1)
    groups: tuple[Group, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The columns without an array per row."""

    rollout_id: int
    target_version: int
    attempt_id: int
    prompt_id: str
    epoch: int
    issued_version: int
    oldest_version: int  # of the group
    newest_version: int
    sample: int  # position in the group
    branch: int  # position in the sample
    prompt: str
    label: str | None  # JSON, if there are several
    prompt_metadata: str  # JSON
    prompt_length: int  # tokens
    response: str
    finish_reason: FinishReason
    reward: float | None
    metadata: str  # of the sample, JSON


def write_dump(path: Path, dump: RolloutDump) -> None:
    """Write a batch atomically. Raises DataError."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    partial = path.with_name(path.name + ".partial")
    try:
        rows, branches = zip(*_rows(dump), strict=True)
        table = arrow.table(
            {name: [getattr(row, name) for row in rows] for name in Row.__struct_fields__}
            | {name: _to_lists([getattr(branch, name) for branch in branches]) for name in PER_TOKEN}
        )
        experts = [branch.routed_experts for branch in branches if branch.routed_experts is not None]
        if len(experts) == len(branches):
            table = table.append_column(EXPERTS, _to_lists([of_branch.ravel() for of_branch in experts]))
        taught = [branch.teacher_logprobs for branch in branches if branch.teacher_logprobs is not None]
        if len(taught) == len(branches):
            table = table.append_column(TEACHER, _to_lists(taught))
        if any(branch.token_rewards is not None for branch in branches):
            table = table.append_column(REWARDS, _to_lists([_token_rewards(branch) for branch in branches]))
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, partial, compression="zstd")
        partial.replace(path)
    except (OSError, TypeError, ValueError, arrow.ArrowException) as error:  # metadata that JSON does not know
        raise DataError(f"--save-debug-rollout-data: cannot write {path}: {error}") from error


def read_dump(path: Path) -> RolloutDump:
    """Read a file of :func:`write_dump`. Raises DataError naming the file and its fault."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(path).read()
        if missing := {*Row.__struct_fields__, *PER_TOKEN} - set(table.column_names):
            raise ValueError(f"there is no column {', '.join(sorted(missing))}")
        rows = msgspec.convert(table.select(Row.__struct_fields__).to_pylist(), list[Row])
        if not rows:
            raise ValueError("there is no sample in it")
        columns = {**PER_TOKEN, **{name: np.float32 for name in (TEACHER, REWARDS) if name in table.column_names}}
        arrays: dict[str, Any] = {name: _from_lists(table.column(name), dtype) for name, dtype in columns.items()}
        for name, array in arrays.items():
            if list(map(len, array)) != list(map(len, arrays["tokens"])):
                raise ValueError(f"arrays of {name} don't have the length of tokens")
        experts = _read_experts(table, arrays["tokens"])
        branches = [
            Branch(
                prompt_length=row.prompt_length,
                routed_experts=of_branch,
                **{name: array[index] for name, array in arrays.items()},
            )
            for index, (row, of_branch) in enumerate(zip(rows, experts, strict=True))
        ]
        by_attempt = groupby(zip(rows, branches, strict=True), lambda pair: pair[0].attempt_id)
        return RolloutDump(
            rollout_id=rows[0].rollout_id,
            target_version=rows[0].target_version,
            groups=tuple(_group(list(pairs)) for _, pairs in by_attempt),
        )
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise DataError(f"{path}: expected what --save-debug-rollout-data writes: {error}") from error


Pair = tuple[Row, Branch]


def _token_rewards(branch: Branch) -> Float32:
    return np.zeros(len(branch.tokens), np.float32) if branch.token_rewards is None else branch.token_rewards


def _rows(dump: RolloutDump) -> Iterator[Pair]:
    for group in dump.groups:
        attempt, prompt = group.attempt, group.attempt.prompt
        for position, sample in enumerate(group.samples):
            for number, branch in enumerate(sample.branches):
                row = Row(
                    rollout_id=dump.rollout_id,
                    target_version=dump.target_version,
                    attempt_id=attempt.attempt_id,
                    prompt_id=prompt.prompt_id,
                    epoch=attempt.epoch,
                    issued_version=attempt.issued_version,
                    oldest_version=group.oldest_version,
                    newest_version=group.newest_version,
                    sample=position,
                    branch=number,
                    prompt=prompt.text,
                    label=_text(prompt.label),
                    prompt_metadata=msgspec.json.encode(prompt.metadata).decode(),
                    prompt_length=branch.prompt_length,
                    response=sample.text,
                    finish_reason=sample.finish_reason,
                    reward=sample.reward,
                    metadata=msgspec.json.encode(sample.metadata).decode(),
                )
                yield row, branch


def _text(label: Label | None) -> str | None:
    return msgspec.json.encode(label).decode() if isinstance(label, tuple) else label


def _group(pairs: Sequence[Pair]) -> Group:
    row, branch = pairs[0]
    prompt = Prompt(
        prompt_id=row.prompt_id,
        token_ids=tuple(branch.tokens[: row.prompt_length].tolist()),
        text=row.prompt,
        label=row.label,
        metadata=msgspec.json.decode(row.prompt_metadata),
    )
    return Group(
        attempt=Attempt(attempt_id=row.attempt_id, prompt=prompt, epoch=row.epoch, issued_version=row.issued_version),
        samples=tuple(_sample(list(of)) for _, of in groupby(pairs, lambda pair: pair[0].sample)),
        oldest_version=row.oldest_version,
        newest_version=row.newest_version,
    )


def _sample(pairs: Sequence[Pair]) -> Sample:
    row, branch = pairs[0]
    return Sample(
        **msgspec.structs.asdict(branch),
        text=row.response,
        finish_reason=row.finish_reason,
        reward=row.reward,
        metadata=msgspec.json.decode(row.metadata),
        more_branches=tuple(branch for _, branch in pairs[1:]),
    )


def _read_experts(table: pyarrow.Table, tokens: Sequence[Int32]) -> Sequence[RoutedExperts | None]:
    """One array per row, [T, ...]. Raises ValueError if tokens don't have the same number of experts."""
    if EXPERTS not in table.column_names:
        return [None] * len(tokens)
    column = table.column(EXPERTS)
    one_byte = column.type.value_type.bit_width == 8
    return [
        flat.reshape(len(row_tokens), -1)
        for flat, row_tokens in zip(_from_lists(column, np.uint8 if one_byte else np.int16), tokens, strict=True)
    ]


def _to_lists(arrays: Sequence[npt.NDArray[np.generic]]) -> pyarrow.LargeListArray:
    import pyarrow as arrow

    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])
    return arrow.LargeListArray.from_arrays(offsets, np.concatenate(arrays))


def _from_lists(column: pyarrow.ChunkedArray, dtype: npt.DTypeLike) -> list[npt.NDArray[Any]]:
    """One array per row; a value that ``dtype`` cannot hold, or a row without a list, is a ValueError."""
    import pyarrow as arrow

    whole = column.cast(arrow.large_list(arrow.from_numpy_dtype(dtype))).combine_chunks()
    if whole.null_count or whole.values.null_count:
        raise ValueError("an array, or an entry of one, is missing")
    values, offsets = whole.values.to_numpy(), whole.offsets.to_numpy()
    return [values[first:end] for first, end in pairwise(offsets)]
