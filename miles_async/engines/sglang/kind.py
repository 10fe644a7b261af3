"""SGLang as a kind of inference server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from miles_async.engines.kind import EngineKind, ServerSpec
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.server import EngineServer, server_environment
from miles_async.runtime.fork_server_process import READ_LATE, ForkServerProcess


def sglang_imports(socket: Path, spec: ServerSpec, environment: Mapping[str, str]) -> ForkServerProcess | None:
    """See ``EngineKind.imports``. None on CUDA, which imports of SGLang's initialize and no fork survives."""
    if spec.device != "cpu":
        return None
    plain = msgspec.structs.replace(spec, held_weights=False, weight_group_seconds=None)  # hooks are each server's own
    return ForkServerProcess(
        socket,
        ["miles_async.engines.sglang.imports"],
        late=READ_LATE,
        log_path=Path(spec.log_dir) / "engine_imports.log",
        environment={**environment, **server_environment(plain)},
    )


SGLANG = EngineKind(process=EngineServer, calls=SGLangServer, imports=sglang_imports)
