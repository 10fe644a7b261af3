"""Ray: starting or joining a cluster, and what its workers inherit."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray

from miles_async.errors import ConfigurationError
from miles_async.run.process import MARK

OBJECT_STORE_BYTES = 1 << 30  # of a cluster that we start: train batches pass through it, weights don't


@contextmanager
def ray_cluster(address: str | None, environment: Mapping[str, str]) -> Iterator[None]:
    """Ray for the duration of a run: the cluster at ``address``, or one of our own on this machine.

    Raises ConfigurationError if there is no cluster at ``address``.
    """
    options = (
        {"address": address}
        if address
        # Actors ask for GPUs only: on a laptop more processes than cores is the normal case.
        else {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": dict(environment)},
            **options,  # type: ignore[arg-type]
        )
    except ConnectionError as error:
        raise ConfigurationError(f"--ray-address {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def worker_environment(patterns: Sequence[str], *, cpu: bool) -> dict[str, str]:
    """What Ray workers get of this process's environment (``--forward-env``, C8), and what they need on a CPU."""
    forwarded = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in (*patterns, MARK))
    }
    # Modules named by --custom-*-path are looked up as they are for the driver: from the working directory on.
    path = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **forwarded,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cpu:  # one thread per process: there are more processes than cores already
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return environment
