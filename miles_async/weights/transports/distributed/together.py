"""Deliveries that engines share, such as a broadcast: find out which engine broke one, and serve the others.

An engine that fails breaks the delivery for all, and the others mostly report that soon. So after a failure these are
to blame: engines that gave no answer within their deadline although others did, and engines that don't answer a probe
afterwards. The rest get everything again together. If no engine can be blamed it is tried once more with all, and then
with each half by itself, down to an engine that fails alone.

A hang costs at most two deadlines, however many engines there are: if no engine answers at all, which says nothing
about any of them, each half is tried once, and engines that don't answer then are to blame.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog

from miles_async.errors import EngineTimeoutError
from miles_async.seams import EngineErrors
from miles_async.types import Incarnation

log = structlog.get_logger(__name__)

Call = Callable[[Sequence[Incarnation]], Awaitable[EngineErrors]]


async def deliver_together(
    send: Call, probe: Call, engines: Sequence[Incarnation], *, again: bool = True, patient: bool = True
) -> EngineErrors:
    """Deliver to all engines but those that break it; return the error of each of these, and None for the others.

    ``send``: send everything to these engines together; if one of them fails, none has it. ``again``: try all once more
    before halving them. ``patient``: no answer from any engine is excused once more.
    """
    errors = await send(engines)
    if not any(errors.values()) or len(engines) == 1:
        return errors
    blamed = gave_no_answer(errors)
    none_answered = len(blamed) == len(engines)
    if none_answered and not patient:
        return errors
    if none_answered:
        blamed, patient = {}, False
    probed = await probe([engine for engine in engines if engine not in blamed])
    blamed |= {engine: error for engine, error in probed.items() if error is not None}
    log.warning(
        "delivery broke",
        engines=len(engines),
        errors=sorted({str(error) for error in errors.values() if error is not None}),
        blamed=[str(engine) for engine in blamed],
    )
    rest = [engine for engine in engines if engine not in blamed]
    if blamed:
        parts = [rest] if rest else []
    elif again and not none_answered:
        parts, again = [rest], False
    else:
        parts = [rest[: len(rest) // 2], rest[len(rest) // 2 :]]
    results: dict[Incarnation, Exception | None] = dict(blamed)
    for part in parts:
        results |= await deliver_together(send, probe, part, again=again, patient=patient)
    return results


def gave_no_answer(errors: EngineErrors) -> dict[Incarnation, Exception]:
    """The engines whose deadline passed."""
    return {engine: error for engine, error in errors.items() if isinstance(error, EngineTimeoutError)}
