"""Names of staged files, on which the driver, the sending ranks and the engines' hosts agree.

::

    v0000012/                       complete once it has this name
        bucket-00000.safetensors    the tensors of one bucket
        manifest.json               types.StagedWeights
"""

from __future__ import annotations

MANIFEST = "manifest.json"


def version_directory(version: int) -> str:
    return f"v{version:07d}"


def bucket_file(index: int) -> str:
    return f"bucket-{index:05d}.safetensors"


def delta_file(index: int) -> str:
    return f"bucket-{index:05d}.delta"
