"""The transports by name (``--weight-transport``), and those that users bring."""

from __future__ import annotations

from typing import Any

from miles_async.errors import ConfigurationError
from miles_async.runtime.hooks import load_instance
from miles_async.weights.transports import disk, distributed, ipc, object_store
from miles_async.weights.transports.spec import TransportSpec

TRANSPORTS: dict[str, TransportSpec[Any]] = {
    spec.name: spec for spec in (distributed.SPEC, disk.SPEC, object_store.SPEC, ipc.SPEC)
}


def find_transport(name: str) -> TransportSpec[Any]:
    """The transport called ``name``, or the one at ``module:attr``. Raises ConfigurationError."""
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    if ":" not in name:
        raise ConfigurationError(
            f"--weight-transport {name}: expected {', '.join(TRANSPORTS)}, or module:attr naming a TransportSpec"
        )
    return load_instance(name, TransportSpec, "--weight-transport")
