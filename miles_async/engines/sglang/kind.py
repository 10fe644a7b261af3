"""SGLang as a kind of inference server."""

from __future__ import annotations

from miles_async.engines.kind import EngineKind
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.server import EngineServer

SGLANG = EngineKind(process=EngineServer, calls=SGLangServer)
