"""Pass rates of prompts in earlier runs (``--pass-rates``), from their ledgers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_async.arguments.data import DataArguments
from miles_async.errors import DataError
from miles_async.ledger.reader import open_ledger
from miles_async.prompts.rows import PromptRows
from miles_async.runtime.files.run_directory import LEDGER_FILE


def pass_rate(rewards: Sequence[float], solved_reward: float) -> float:
    """Share of the rewards that are at least ``solved_reward``; there is one at least."""
    return sum(reward >= solved_reward for reward in rewards) / len(rewards)


def earlier_rates(rows: PromptRows, arguments: DataArguments) -> dict[int, float]:
    """The pass rate of each row's last finished group; of several runs, the last one that has the prompt decides.

    Raises DataError for a directory whose ledger is absent, has no finished group, or has other prompts, and
    LedgerError.
    """
    rates: dict[int, float] = {}
    for directory in arguments.pass_rates:
        found = _rates(Path(directory), rows, arguments.solved_reward)
        if not found:
            raise DataError(f"--pass-rates {directory}: this run finished no group of a prompt of {rows.name}")
        rates |= found
    return rates


def _rates(directory: Path, rows: PromptRows, solved_reward: float) -> dict[int, float]:
    path, where = directory / LEDGER_FILE, f"--pass-rates {directory}"
    if not path.is_file():
        raise DataError(f"{where}: expected a run directory with a {LEDGER_FILE}")
    with open_ledger(path) as ledger:
        opened = ledger.prompts_opened()
        if opened is None:  # it ended before
            return {}
        if not rows.has_ids:
            _require_same(opened.files, rows, where)
        known = ((rows.index(prompt_id), rewards) for prompt_id, rewards in ledger.group_rewards() if rewards)
        return {row: pass_rate(rewards, solved_reward) for row, rewards in known if row is not None}


def _require_same(digests: Mapping[str, str], rows: PromptRows, where: str) -> None:
    """Rows without ids are known by their numbers, which mean other prompts in another file."""
    for file in rows.files:
        if digests.get(file.label, file.digest) != file.digest:
            raise DataError(
                f"{where}: {file.place} has changed since that run, and its prompts are known by the numbers of their "
                "rows: restore it, or give prompts ids that stay (--prompt-id-key) in both runs"
            )
