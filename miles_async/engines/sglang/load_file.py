"""Put SGLang's load-sharing file into the server's temporary directory, so that it is removed with the server.

SGLang has it in /dev/shm under a random name and never removes it: a server that failed before anybody had seen it
would leave it there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sglang.srt.managers import load_snapshot


def register() -> None:
    """Keep the load file in the server's temporary directory, in this process and those that it forks."""
    load_snapshot.shm_path_for = _path


def _path(instance: str) -> str:
    return str(Path(tempfile.gettempdir()) / f"load_{instance}")
