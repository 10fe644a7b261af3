"""Samples of a prompt stay in one micro-batch where that makes the heaviest rank lighter, and nowhere else.

# covers: M2
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from miles_async.train_data.balance import Ranks, balance, pack
from miles_async.train_data.siblings import Siblings, balance_siblings
from miles_async.train_data.work import sequence_work

FAMILIES = st.lists(  # (tokens of the prompt, tokens of its responses)
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 20), min_size=1, max_size=9)), min_size=1, max_size=6
)
CAPS = st.integers(20, 400)
QUADRATIC = st.sampled_from([0.0, 0.02])


class Case:
    """Sequences of the families, shuffled, and plans for them."""

    def __init__(self, families: list[tuple[int, list[int]]], seed: int, quadratic: float) -> None:
        rows = [(family, prompt, prompt + each) for family, (prompt, own) in enumerate(families) for each in own]
        order = np.random.default_rng(seed).permutation(len(rows))
        family, prompts, lengths = np.array(rows, dtype=np.int64)[order].T
        self.siblings = Siblings(family, prompts)
        self.lengths = lengths.tolist()
        self.work, self.prompt_work = sequence_work(lengths, quadratic), sequence_work(prompts, quadratic)

    def together(self, ranks: int, max_tokens: int) -> Ranks:
        return balance_siblings(self.lengths, self.work, self.prompt_work, self.siblings, ranks, max_tokens)

    def heaviest(self, plan: Ranks) -> float:
        """Work of the heaviest rank, counted token by token: a prompt once in every micro-batch."""
        totals = []
        for bins in plan:
            own = sum(self.work[i] - self.prompt_work[i] for members in bins for i in members)
            families = [{self.siblings.families[i]: self.prompt_work[i] for i in members} for members in bins]
            totals.append(own + sum(sum(prompts.values()) for prompts in families))
        return max(totals)


CASES = st.builds(Case, FAMILIES, st.integers(0, 2**32 - 1), QUADRATIC)


@given(CASES, st.integers(1, 6), CAPS)
def test_every_sequence_is_in_one_micro_batch_that_fits(case: Case, ranks: int, max_tokens: int) -> None:
    plan = case.together(ranks, max_tokens)
    assert len(plan) == ranks
    assert sorted(i for bins in plan for members in bins for i in members) == list(range(len(case.lengths)))
    assert all(len(members) == 1 or sum(case.lengths[i] for i in members) <= max_tokens for b in plan for members in b)


@given(CASES, st.integers(1, 6), CAPS)
def test_the_heaviest_rank_is_never_heavier_than_without_siblings(case: Case, ranks: int, max_tokens: int) -> None:
    apart = balance(case.lengths, case.work, ranks, max_tokens)
    assert case.heaviest(case.together(ranks, max_tokens)) <= case.heaviest(apart) * (1 + 1e-9)


@given(CASES, CAPS)
def test_on_one_rank_prompts_pass_as_rarely_as_the_limit_allows(case: Case, max_tokens: int) -> None:
    plan = case.together(1, max_tokens)
    fewest = 0.0  # work of the prompts if each family has micro-batches of its own: one where it fits
    for family in range(int(case.siblings.families.max()) + 1):
        members = np.flatnonzero(case.siblings.families == family)
        passes = len(pack([case.lengths[i] for i in members], max_tokens))
        fewest += passes * case.prompt_work[members[0]]
    responses = float((case.work - case.prompt_work).sum())
    assert case.heaviest(plan) - responses <= fewest + 1e-6


def test_two_groups_on_two_ranks_stay_whole_and_on_four_are_halved() -> None:
    case = Case([(40, [1] * 8), (40, [1] * 8)], 0, 0.0)
    for ranks, groups_of_rank, samples in ((2, 1, 8), (4, 1, 4)):
        for bins in case.together(ranks, 10_000):
            members = [i for each in bins for i in each]
            assert len(members) == samples
            assert len({case.siblings.families[i] for i in members}) == groups_of_rank
