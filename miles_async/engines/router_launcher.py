"""Starts smg with the run's keys: ``python -m miles_async.engines.router_launcher <arguments of smg launch>``.

smg takes keys as arguments only, which every user of the machine can read. Here they come in the environment and are
added to the arguments inside of the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from miles_async.runtime.network.keys import EngineKeys, take_engine_keys


def with_keys(arguments: Sequence[str], keys: EngineKeys | None) -> list[str]:
    """Return the arguments with smg's keys: one for requests, the admin one for the list of engines."""
    if keys is None:
        return ["launch", *arguments]
    control = f"run:run:admin:{keys.admin.reveal()}"
    return ["launch", *arguments, f"--api-key={keys.api.reveal()}", f"--control-plane-api-keys={control}"]


if __name__ == "__main__":
    from smg.cli import main

    main(with_keys(sys.argv[1:], take_engine_keys(os.environ)))
