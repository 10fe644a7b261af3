"""Everything that an SGLang server on a CPU imports, in its main process and its schedulers, for a fork server."""

# ruff: noqa: F401, I001  (imported to be there, and in this order)

import os

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # as the launcher does

import miles_async.engines.sglang.launcher
import sglang.srt.entrypoints.http_server
import sglang.srt.entrypoints.openai.serving_responses
import sglang.srt.layers.attention.torch_native_backend
import sglang.srt.managers.tp_worker
import sglang.srt.models.registry
