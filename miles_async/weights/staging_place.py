"""The directory for staged weights: in memory where it fits, else on disk, or the one that the user names."""

from __future__ import annotations

import shutil

import structlog

from miles_async.errors import ConfigurationError
from miles_async.runtime.owned_directory import OwnedDirectory
from miles_async.runtime.scratch import scratch_directory
from miles_async.weights.staging_options import StagingOptions

log = structlog.get_logger(__name__)


def make_staging_directory(options: StagingOptions) -> OwnedDirectory:
    """Make a directory with room for what one sender stages. Raises ConfigurationError if there is none."""
    mode = 0o755 if options.shared else 0o700
    try:
        if options.parent is None:
            directory = scratch_directory(options.room, mode=mode)
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
