"""SGLang as a kind of inference server."""

from __future__ import annotations

from miles_async.engines.kind import EngineKind
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.server import above_rendezvous, is_up, server_command, server_environment

SGLANG = EngineKind(
    name="SGLang",
    command=server_command,
    environment=server_environment,
    above_rendezvous=above_rendezvous,
    is_up=is_up,
    calls=SGLangServer,
    streams=True,
    imports=("miles_async.engines.sglang.imports",),
    own_variables="SGLANG_.*|HF_HUB_OFFLINE",
)
