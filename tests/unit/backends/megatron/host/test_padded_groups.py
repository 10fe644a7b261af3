"""Packed sequences as padded batches: every query is computed once, and sees its sequence up to itself."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from miles_async.backends.megatron.host.padded_groups import padded_groups

SEQUENCES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8
)  # (tokens before, tokens with queries)


@given(SEQUENCES, st.booleans())
def test_every_query_is_in_one_group_with_the_tokens_that_it_sees(rows: list[tuple[int, int]], all_own: bool) -> None:
    ends = torch.tensor([0, *(sum(row) for row in rows)]).cumsum(0)
    own = ends.diff() if all_own else torch.tensor([count for _, count in rows], dtype=torch.int64)
    seen: dict[int, list[int]] = {}
    for group in padded_groups(ends, None if all_own else own):
        assert int(group.valid.sum(1).min()) * 2 >= group.valid.shape[1]  # at most half is padding
        depths = torch.arange(group.queries.shape[1]).expand_as(group.queries) if all_own else group.depths
        assert depths is not None
        for row, column in group.valid.nonzero().tolist():
            query = int(group.queries[row, column])
            assert query not in seen
            seen[query] = group.keys[row, : int(depths[row, column]) + 1].tolist()
    assert seen == {
        query: list(range(int(start), query + 1))
        for start, end, count in zip(ends[:-1], ends[1:], own.tolist(), strict=True)
        for query in range(int(end) - count, int(end))
    }
