"""Hugging Face weight files, written by all ranks side by side.

Exporting is collective and gives every rank every tensor; the files of the source checkpoint are dealt out to the
ranks, and each writes its own in a thread while the export goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from torch import Tensor

from miles_async.errors import CheckpointError
from miles_async.types import JsonObject

INDEX_FILE = "model.safetensors.index.json"


def write_files(
    tensors: Iterable[tuple[str, Tensor]], files: Mapping[str, str], directory: Path, *, rank: int, ranks: int
) -> dict[str, int]:
    """Write every ``ranks``-th file, starting with number ``rank``. Takes all tensors, and returns the bytes of each.

    ``files``: tensor name → file name. A file whose tensors are not all exported has the others. At most two files are
    in memory: one that is being written, and one whose tensors come. Raises OSError, SafetensorError, and
    CheckpointError if a tensor belongs to no file, once all tensors were taken.
    """
    from safetensors.torch import save_file

    kept: dict[str, dict[str, Tensor]] = {file: {} for file in sorted(set(files.values()))[rank::ranks]}
    complete, sizes = Counter(files.values()), dict[str, int]()
    writes: list[Future[None]] = []
    with ThreadPoolExecutor(max_workers=1) as thread:

        def write(file: str) -> None:
            wait(writes)
            writes.append(thread.submit(save_file, kept.pop(file), directory / file))

        for name, tensor in tensors:
            sizes[name] = tensor.nbytes
            file = files.get(name, "")
            if file in kept:
                kept[file][name] = tensor
                if len(kept[file]) == complete[file]:
                    write(file)
        for file in [file for file, present in kept.items() if present]:
            write(file)
    for done in writes:
        done.result()
    if unknown := sorted(sizes.keys() - files.keys()):
        raise CheckpointError(f"tensors that no file of --hf-checkpoint has: {', '.join(unknown[:3])}")
    return sizes


def file_index(sizes: Mapping[str, int], files: Mapping[str, str]) -> JsonObject:
    """Contents of ``INDEX_FILE`` for exported tensors of these bytes."""
    return {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: files[name] for name in sorted(sizes)},
    }
