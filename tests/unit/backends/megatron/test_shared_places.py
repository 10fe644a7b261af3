"""Where tokens stand in a packed sequence whose samples share their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_async.backends.megatron.shared_places import first_uses, shared_places


def places_of(samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """(Tokens, their places) of samples of (prompt, response)."""
    rows = [[*prompt, *response] for prompt, response in samples]
    needed = [flag for prompt, response in samples for flag in [False] * len(prompt) + [True] * len(response)]
    tokens = np.array([token for row in rows for token in row], dtype=np.int64)
    return tokens, shared_places(tokens, np.cumsum([0, *map(len, rows)]), np.array(needed, dtype=bool))


def test_samples_of_one_prompt_have_it_once() -> None:
    _, places = places_of([([5, 6], [1, 2]), ([5, 6], [3]), ([7], [4]), ([5, 6], [1, 2])])
    assert places.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 0, 1, 7, 8]
    assert first_uses(places).tolist() == [True] * 4 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2


def test_a_prompt_that_another_one_begins_with_is_not_shared() -> None:
    _, places = places_of([([5, 6], [1]), ([5], [6, 1])])
    assert places.tolist() == [0, 1, 2, 3, 4, 5]


def test_samples_without_a_prompt_and_no_samples() -> None:
    assert places_of([([], [1, 2]), ([], [1, 2])])[1].tolist() == [0, 1, 2, 3]
    assert places_of([])[1].tolist() == []


SAMPLES = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=3), st.lists(st.integers(0, 1), max_size=3)))


@given(SAMPLES)
def test_every_position_has_one_token_and_one_first_use(samples: list[tuple[list[int], list[int]]]) -> None:
    tokens, places = places_of(samples)
    used = int(places.max(initial=-1)) + 1
    assert sorted(places[first_uses(places)].tolist()) == list(range(used))
    held = np.zeros(used, dtype=np.int64)
    held[places] = tokens
    assert held[places].tolist() == tokens.tolist()
    own = sum(len(response) for _, response in samples)
    prompts = {tuple(prompt) for prompt, _ in samples}
    assert used == own + sum(map(len, prompts))
