"""Keep sequences with the same prompt in one micro-batch, where it passes through the model once
(``--share-prefixes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_async.train_data.balance import Bin, Float64, Ranks, balance, lightest, pack
from miles_async.train_data.batch import BranchTable
from miles_async.types import Int64


@dataclass(frozen=True, slots=True)
class Siblings:
    """Which of S sequences share a prompt, and its length."""

    families: Int64  # [S]: equal for equal prompts, from 0
    prompt_lengths: Int64  # [S] tokens before the first that carries loss

    @staticmethod
    def of(table: BranchTable, indices: Int64) -> Siblings:
        """Find the siblings among the branches ``indices`` of the table."""
        branches = [table.branches[index] for index in indices.tolist()]
        lengths = np.array([int(np.argmax(branch.loss_mask != 0)) for branch in branches], dtype=np.int64)
        numbers: dict[bytes, int] = {}
        prompts = [branch.tokens[:length].tobytes() for branch, length in zip(branches, lengths, strict=True)]
        return Siblings(np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts]), lengths)

    def work(self, members: Bin, work: Float64, prompt_work: Float64) -> float:
        """Work of a micro-batch, [S] given of whole sequences and of their prompts: each prompt counts once."""
        firsts = np.unique(self.families[members], return_index=True)[1]
        prompts = prompt_work[members]
        return float(work[members].sum() - prompts.sum() + prompts[firsts].sum())


def balance_siblings(
    lengths: Sequence[int], work: Float64, prompt_work: Float64, siblings: Siblings, ranks: int, max_tokens: int
) -> Ranks:
    """Like ``balance``, but keep siblings together where that makes the heaviest rank lighter.

    Candidates are plans for whole families, halves, quarters and so on, and single sequences. A family that is too long
    for a micro-batch is packed into few. On one rank, prompts are no more work than with every family whole.

    Args:
        lengths: tokens of each sequence.
        work: [S], of each sequence, in any unit.
        prompt_work: [S], the prompt's part of it.
        siblings: which sequences share their prompt.
        ranks: at least 1.
        max_tokens: per micro-batch, counted in tokens of whole sequences; a longer sequence gets its own.
    """
    families = [np.flatnonzero(siblings.families == family) for family in range(int(siblings.families.max()) + 1)]
    largest = max(map(len, families))
    plans: list[Ranks] = []
    parts = 1
    while parts < largest:
        divided = [part for family in families for part in np.array_split(family, min(parts, len(family)))]
        units = [unit for part in divided for unit in _fitting(part, lengths, max_tokens)]
        unit_lengths = [sum(lengths[index] for index in unit) for unit in units]
        unit_work = np.array([siblings.work(unit, work, prompt_work) for unit in units])
        plan = balance(unit_lengths, unit_work, ranks, max_tokens)
        plans.append([[[index for unit in members for index in units[unit]] for members in bins] for bins in plan])
        parts *= 2
    plans.append(balance(lengths, work, ranks, max_tokens))
    return lightest(plans, lambda members: siblings.work(members, work, prompt_work))


def _fitting(part: Int64, lengths: Sequence[int], max_tokens: int) -> list[Bin]:
    """Split the part's sequences into few lists that each fit into a micro-batch."""
    members: Bin = part.tolist()
    return [[members[i] for i in unit] for unit in pack([lengths[index] for index in members], max_tokens)]
