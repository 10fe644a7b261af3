"""Export for transformers and SGLang: weights, config.json, and the other files of the source checkpoint.

Exporting is collective and gives every rank every tensor; the files of the source checkpoint are dealt out to the
ranks, and each writes its own in a thread while the export continues.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from miles_async.arguments.model import ModelArguments
from miles_async.backends.megatron.distributed import together
from miles_async.backends.megatron.families import hf_config
from miles_async.errors import CheckpointError
from miles_async.types import JsonObject

if TYPE_CHECKING:
    from miles_async.backends.megatron.model.build import LoadedModel

ADAPTER_DIRECTORY = "adapter"  # transformers would load adapter files next to the weights with them
INDEX_FILE = "model.safetensors.index.json"
MOST_BYTES = 1 << 28  # of one file: the largest vocabularies have 40 MB; larger files are weights by another name
_WEIGHTS = frozenset(
    f".{suffix}" for suffix in "safetensors bin pt pth ckpt gguf ggml h5 msgpack npz onnx onnx_data ot pkl".split()
)
_OWN = frozenset({"config.json", "README.md"})  # written for the export; and the source's README


def save_hf(directory: Path, model: LoadedModel, source: Path, arguments: ModelArguments) -> None:
    """Export the model whose initial weights are in ``source``. Collective. Raises CheckpointError.

    Adapters are merged into the weights, and also written alone: as peft's files, in ``ADAPTER_DIRECTORY``.
    """

    def write_config() -> None:
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            copy_companions(source, directory)
            dtype = "bfloat16" if arguments.bf16 else "float32"
            _write_json(directory / "config.json", hf_config.with_dtype(hf_config.read_config(source), dtype))

    def write_weights() -> None:
        """This rank's files; on rank 0 the index, too."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        files = model.bridge.hf_pretrained.state.source.key_to_filename_map
        sizes = write_files(model.saved(), files, directory, rank=rank, ranks=ranks)
        for file in sorted(set(files.values()))[rank::ranks]:
            if (directory / file).exists():  # safetensors writes with mode 600, whatever the umask
                shutil.copymode(directory / "config.json", directory / file)
        if rank == 0 and (source / INDEX_FILE).exists():
            _write_json(directory / INDEX_FILE, file_index(sizes, files))

    def write_adapter() -> None:
        from miles_async.backends.megatron.adapters import files

        files.write_adapter(directory / ADAPTER_DIRECTORY, model.bridge, model.modules, arguments)

    for write in (write_config, write_weights, *((write_adapter,) if model.adapted else ())):
        _export_together(directory, write)


def _export_together(directory: Path, write: Callable[[], None]) -> None:
    from safetensors import SafetensorError

    def work() -> None:
        try:
            write()
        except (OSError, SafetensorError, CheckpointError) as error:
            raise CheckpointError(f"--save-hf {directory}: cannot export: {error}") from error

    together(work)


def _write_json(path: Path, content: JsonObject) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def copy_companions(source: Path, target: Path) -> None:
    """Copy everything from ``source`` that is not weights, an index of weights, hidden, or larger than ``MOST_BYTES``.

    The bridge would save versions rewritten by transformers, and a tokenizer even if there was none. Folders are copied
    as well (``additional_chat_templates``), but for those with weights: these hold an adapter, or another copy of the
    model (``original``, ``onnx``). Raises OSError.
    """
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in _OWN or target.is_relative_to(path):
            continue
        files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
        if any(map(_holds_weights, files)):
            continue
        for file in files:
            copied = target / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)


def _holds_weights(file: Path) -> bool:
    return file.suffix in _WEIGHTS or file.name.endswith(".index.json") or file.stat().st_size > MOST_BYTES


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
