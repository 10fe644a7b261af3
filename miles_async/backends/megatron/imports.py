"""Everything that a trainer rank on a CPU imports, for a fork server."""

# ruff: noqa: E402, F401  (imported to be there, after what they need)

from miles_async.backends.megatron.platform import Platform

Platform.cpu().prepare(0)  # makes megatron importable

import miles_async.algorithms.losses
import miles_async.backends.megatron.backend
import miles_async.backends.megatron.checkpoints.checkpoint
import miles_async.backends.megatron.distributed
import miles_async.backends.megatron.model.build
import miles_async.backends.megatron.step
