"""The directory for staged weights: in memory where it fits, else on disk, or the one that the user names.

Wherever it is, weights are copied to memory first.
"""

from __future__ import annotations

import shutil

import structlog

from miles_async.errors import ConfigurationError
from miles_async.runtime.files.owned_directory import OwnedDirectory
from miles_async.runtime.files.scratch import scratch_directory
from miles_async.runtime.memory import free_memory
from miles_async.weights.staging_options import StagingOptions

log = structlog.get_logger(__name__)


def make_staging_directory(options: StagingOptions) -> OwnedDirectory:
    """Make a directory with room for what one sender stages. Raises ConfigurationError if there is none, or no memory
    for the copy that is staged.
    """
    _check_memory(options)
    mode = 0o755 if options.shared else 0o700
    try:
        if options.parent is None:
            directory = scratch_directory(options.room_in_memory, mode=mode)
        else:
            directory = OwnedDirectory(options.parent, mode=mode)
        free = shutil.disk_usage(directory.path).free
    except OSError as error:
        raise ConfigurationError(f"weights cannot be staged: {error} (--weight-staging-dir)") from error
    needed = options.room or 0
    if free < needed:
        directory.remove()
        raise ConfigurationError(
            f"weights cannot be staged in {directory.path.parent}: expected {needed / 1e9:.1f} GB for "
            f"{options.versions} versions, found {free / 1e9:.1f} GB: name a directory with more room by "
            "--weight-staging-dir"
        )
    log.info("weights are staged", directory=str(directory.path), room_gb=round(needed / 1e9, 1))
    return directory


def _check_memory(options: StagingOptions) -> None:
    needed, free = options.version_bytes or 0, free_memory()
    if free < needed:
        raise ConfigurationError(
            f"weights cannot be copied to host memory: expected {needed / 1e9:.1f} GB for this rank's share, found "
            f"{free / 1e9:.1f} GB free: with --weight-transport distributed or object_store every pipeline stage "
            "(--pipeline-model-parallel-size) has a sending rank of its own with a share"
        )
