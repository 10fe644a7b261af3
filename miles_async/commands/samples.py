"""``miles-async samples``: text and tokens of a run's samples in a terminal, during the run and after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from miles_async.commands.parser import CommandParser, at_least_one
from miles_async.commands.samples_view import conversation, summary_table, token_table
from miles_async.errors import ConfigurationError, DataError
from miles_async.runtime.files.run_directory import check_directory
from miles_async.runtime.texts import escaped
from miles_async.samples.columns import Kind, SampleSummary
from miles_async.samples.query import Order, Query, find, ordered
from miles_async.samples.reader import read_sample, read_state, samples_files

SHOWN = 20


def samples(words: Sequence[str]) -> Iterator[str]:
    """Yield the output of ``miles-async samples``. Raises ConfigurationError and DataError."""
    parser = _parser()
    parsed = parser.parse_args(words)
    if parsed.reverse and parsed.sort is None:
        parser.error("--reverse orders what --sort names: give both")
    if parsed.tokens and parsed.show is None:
        parser.error("--tokens is about the sample of --show: give both")
    run_dir: Path = parsed.directory
    check_directory(run_dir)
    if not samples_files(run_dir):
        raise ConfigurationError(
            f"{run_dir} has no samples: nothing was trained or evaluated yet, or the run had --save-samples 0"
        )
    query = Query(
        kind=parsed.kind,
        steps=parsed.step or (),
        group=parsed.group,
        prompt_id=parsed.prompt,
        data_set=parsed.data_set,
        reward=parsed.reward,
        length=parsed.length,
        age=parsed.age,
        finish_reason=parsed.finish_reason,
        filtered=True if parsed.filtered else None,
        text=parsed.text,
    )
    rows = list(find(run_dir, query, _report))
    if parsed.sort is not None:
        rows = ordered(rows, parsed.sort, reverse=parsed.reverse)
    if not rows:
        raise ConfigurationError(f"{run_dir}: no sample matches; {_there(run_dir)}")
    if parsed.show is None:
        yield summary_table(rows[: parsed.limit])
        if len(rows) > parsed.limit:
            yield f"and {len(rows) - parsed.limit} more: --limit {len(rows)} shows them\n"
        yield "--show ROW prints one of them (--tokens: by token), with the same words before it\n"
        if (state := read_state(run_dir)) is not None:
            yield "".join(f"{escaped(note)}\n" for note in state.notes)
    else:
        yield from _one(run_dir, rows, parsed.show, by_token=parsed.tokens)


def _one(run_dir: Path, rows: Sequence[SampleSummary], number: int, *, by_token: bool) -> Iterator[str]:
    if not 1 <= number <= len(rows):
        raise ConfigurationError(f"--show {number}: expected a row from 1 to {len(rows)}")
    row = rows[number - 1]
    for branch in read_sample(run_dir, row.kind, row.step, row.attempt_id, row.sample):
        if branch.branch == row.branch and branch.data_set == row.data_set:
            yield token_table(branch) if by_token else conversation(branch)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="miles-async samples",
        description="Show samples of a run: a table of matching ones, or one of them as text or by token.",
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument(
        "--step", type=int, nargs="+", metavar="N", help="of these steps, or evaluations after so many steps"
    )
    parser.add_argument("--kind", choices=get_args(Kind), help="of training or of evaluations only")
    parser.add_argument(
        "--group", type=int, metavar="ATTEMPT", help="of this group, by the attempt's number in the ledger"
    )
    parser.add_argument("--prompt", metavar="ID", help="of this prompt")
    parser.add_argument("--data-set", metavar="NAME", help="of this data set of --eval-prompt-data")
    parser.add_argument(
        "--reward", type=_range, metavar="FROM:TO", help="with a reward in this range; either end may be left out"
    )
    parser.add_argument("--length", type=_range, metavar="FROM:TO", help="with so many tokens after the prompt")
    parser.add_argument("--age", type=_range, metavar="FROM:TO", help="of this age")
    parser.add_argument("--finish-reason", choices=("stop", "length", "abort"), help="that ended so")
    parser.add_argument("--filtered", action="store_true", help="of groups that a filter kept from training")
    parser.add_argument("--text", metavar="WORDS", help="with this text in prompt, response or conversation")
    parser.add_argument("--sort", choices=get_args(Order), help="largest first (default: by step)")
    parser.add_argument("--reverse", action="store_true", help="smallest first")
    parser.add_argument(
        "--limit", type=at_least_one, default=SHOWN, metavar="N", help=f"rows to print (default: {SHOWN})"
    )
    parser.add_argument(
        "--show", type=int, metavar="ROW", help="print the sample of this row of the table, as a conversation"
    )
    parser.add_argument(
        "--tokens", action="store_true", help="with --show: a line per token, with version, log-probs, mask and more"
    )
    return parser


def _range(text: str) -> tuple[float, float]:
    """``FROM:TO``, or one number. Raises ValueError, which argparse reports."""
    first, colon, last = text.partition(":")
    low = float(first) if first else float("-inf")
    return low, (float(last) if last else float("inf")) if colon else low


def _there(run_dir: Path) -> str:
    steps = {kind: [file.step for file in samples_files(run_dir) if file.kind == kind] for kind in get_args(Kind)}
    return "; ".join(f"{kind}: steps {numbers[0]} to {numbers[-1]}" for kind, numbers in steps.items() if numbers)


def _report(error: DataError) -> None:
    print(f"skipped: {error}", file=sys.stderr)
