"""The first error surfaces, whatever else goes wrong while things are put away."""

from __future__ import annotations

import pytest

from miles_async.errors import EngineError, TrainerError
from miles_async.runtime.tasks import afterwards, quietly

# covers: C10


async def failing() -> None:
    raise EngineError("cannot stop")


async def test_an_error_of_cleaning_up_does_not_hide_the_one_before() -> None:
    with pytest.raises(TrainerError, match="rank 1 died"):
        async with afterwards(failing):
            raise TrainerError("rank 1 died")


async def test_without_an_error_before_it_it_surfaces() -> None:
    with pytest.raises(EngineError, match="cannot stop"):
        async with afterwards(failing):
            pass


async def test_several_are_all_awaited() -> None:
    done: list[str] = []

    async def note(name: str) -> None:
        done.append(name)

    with pytest.raises(TrainerError):
        async with afterwards(lambda: note("second")), afterwards(failing), afterwards(lambda: note("first")):
            raise TrainerError("rank 1 died")
    assert done == ["first", "second"]


async def test_quietly_raises_nothing() -> None:
    await quietly(failing())
