"""Call a function that may never end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return what ``function`` returns, or raise what it raises.

    Raises TimeoutError if it takes longer. It then continues in a daemon thread, since Python cannot end it: callers
    report an error that ends the process.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # raised again where the result is waited for
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True, name="time-limit").start()
    return outcome.result(seconds)
