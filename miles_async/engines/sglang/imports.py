"""Everything that an SGLang server on a CPU imports, in its main process and its schedulers, for a fork server."""

# ruff: noqa: E402, F401, I001  (imported to be there, and in this order)

import os

from huggingface_hub import constants

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # as the launcher does
# It may have been imported before this process had its environment.
constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE") == "1"

import miles_async.engines.sglang.launcher
import sglang.srt.entrypoints.http_server
import sglang.srt.entrypoints.openai.serving_responses
import sglang.srt.layers.attention.torch_native_backend
import sglang.srt.managers.tp_worker
import sglang.srt.models.registry
