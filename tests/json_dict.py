"""The type of JSON that tests build or change; ``miles_async.types.JsonObject`` is the one to read."""

from __future__ import annotations

from typing import Any

JsonDict = dict[str, Any]
