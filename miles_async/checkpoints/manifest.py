"""``manifest.json``: the files of a complete checkpoint, its model, and the layout of ranks that saved it.

Read before anything starts: a truncated file or another model's checkpoint costs milliseconds instead of a start. The
digests of the trainer's files are compared when its ranks are up, which read them side by side.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from xxhash import xxh3_128

from miles_async.arguments.adapters import target_layers
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.model_files import read_config
from miles_async.checkpoints.files import TRAINER_FILE, Checkpoint, list_checkpoints, position_problems
from miles_async.checkpoints.model_function import critic_function, differing, model_function
from miles_async.errors import CheckpointError
from miles_async.runtime.files.digests import digest_file, digest_pieces, split, write_digested
from miles_async.types import JsonObject

MANIFEST_FILE = "manifest.json"
SHOWN = 3  # files in one error

# Fields of config.json that decide which tensors there are, and their shapes.
SHAPING = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "attention_bias", "use_qk_norm"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("first_k_dense_replace", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("global_head_dim", "num_global_key_value_heads", "per_layer_config", "attention_k_eq_v", "enable_moe_block"),
)
ADAPTING = ("lora_rank", "lora_type", "lora_alpha", "target_modules", "weights")

SAMPLES, SAMPLE_BYTES = 4, 16 * 1024  # of each file of weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Facts about a run that each of its checkpoints carries."""

    run: str
    model: JsonObject  # fingerprint()
    ranks: Mapping[str, int]  # sizes of its layout, such as {"DP": 2, "TP": 1, "PP": 1}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of manifest.json."""

    model: JsonObject
    ranks: dict[str, int]
    files: dict[str, int]  # path below the checkpoint → bytes; all files but the manifest itself
    step: int
    digests: dict[str, str]  # of the same files (runtime/files/digests.py)
    seal: str = ""  # digest of all the rest

    def select(self, *, trainer: bool) -> dict[str, int]:
        """Bytes of the files whose digests the trainer's ranks compare, or of the others, which the driver reads."""
        large = {name for name in self.files if name.startswith("trainer/") and name != TRAINER_FILE}
        return {name: size for name, size in self.files.items() if (name in large) is trainer}


def new_run_name(run_dir: Path) -> str:
    """Make a name that no other run has: "latest-20260807-101502-3fa1"."""
    return f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def fingerprint(model: ModelArguments, critic: Path | None = None) -> JsonObject:
    """Return fields of config.json and flags of adapters that differ between models with different tensors, and as
    ``function`` what else decides what the model computes (``model_function.py``), including a separate ``critic``.

    A checkpoint of adapters holds no other weights, so it also says which weights they belong to.
    """
    directory = model.directory
    config = read_config(directory)
    shape = {name: config[name] for name in SHAPING if config.get(name) is not None}
    shape["function"] = {**model_function(directory), **(critic_function(critic) if critic is not None else {})}
    if not model.lora_rank:
        return shape | {"lora_rank": 0}
    return shape | {
        "lora_rank": model.lora_rank,
        "lora_type": model.lora_type,
        "lora_alpha": model.lora_alpha,
        "target_modules": ",".join(target_layers(model.target_modules)),
        "weights": _sample(directory),
    }


def least_bytes(model: ModelArguments) -> int:
    """Least size of a checkpoint of this model: in fp32 weights and Adam's two moments, at 4 bytes per element,
    are three times the weights' files if these are in fp32 too, and more if they are in fewer bits.
    """
    hf_checkpoint = model.hf_checkpoint
    if hf_checkpoint is None or model.lora_rank:
        return 0
    return 3 * sum(path.stat().st_size for path in hf_checkpoint.glob("*.safetensors"))


def write_manifest(directory: Path, identity: RunIdentity, step: int, digests: Mapping[str, str]) -> None:
    """Write the manifest of all files in ``directory`` and sync it to disk.

    ``digests``: of files that were digested while they were written; the others are read again.
    """
    files = {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / MANIFEST_FILE
    }
    manifest = Manifest(
        model=dict(identity.model),
        ranks=dict(identity.ranks),
        files=files,
        step=step,
        digests={name: digests.get(name) or digest_file(directory / name) for name in files},
    )
    content = msgspec.to_builtins(manifest)
    write_digested(
        directory / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(content | {"seal": _seal(content)}))
    )


def check_whole(checkpoint: Checkpoint, model: JsonObject, anyway: Collection[str] = ()) -> Manifest:
    """Read the manifest; check that all files are there and belong to ``model``. Raises CheckpointError.

    ``anyway``: names of ``model["function"]`` that may differ (``--load-anyway``).
    """
    manifest = _read(checkpoint)
    problems = _shortened(_broken_files(checkpoint.directory, manifest))
    problems = problems or _shortened(_changed_files(checkpoint.directory, manifest))
    problems += position_problems(checkpoint, {MANIFEST_FILE: manifest.step})
    problems += _differences(manifest.model, model, anyway)
    if problems:
        raise _refusal(checkpoint, problems)
    return manifest


def check_trainer_files(checkpoint: Checkpoint, manifest: Manifest, found: Mapping[str, str]) -> None:
    """Compare the digests of the trainer's files with the manifest. Raises CheckpointError."""
    if problems := _shortened(_changed(manifest, found)):
        raise _refusal(checkpoint, problems)


def _read(checkpoint: Checkpoint) -> Manifest:
    path = checkpoint.directory / MANIFEST_FILE
    try:
        content = path.read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
        fields = msgspec.json.decode(content)
    except FileNotFoundError:
        raise CheckpointError(
            f"--load {checkpoint.directory}: expected a {MANIFEST_FILE}, found none{_advice(checkpoint)}"
        ) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--load {path}: {error}{_advice(checkpoint)}") from error
    if manifest.seal != _seal(fields):
        raise _refusal(checkpoint, [f"{MANIFEST_FILE} is not as it was saved: its own digest, seal, is another one"])
    if checkpoint.run is None:
        raise CheckpointError(f"--load {checkpoint.directory}: position.json names no run{_advice(checkpoint)}")
    return manifest


def _refusal(checkpoint: Checkpoint, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"--load {checkpoint.directory}: {'; '.join(problems)}{_advice(checkpoint)}")


def _seal(fields: Mapping[str, object]) -> str:
    """Digest of a manifest's fields but for the seal."""
    rest = {name: value for name, value in fields.items() if name != "seal"}
    return xxh3_128(msgspec.json.encode(rest, order="sorted")).hexdigest()


def _changed_files(directory: Path, manifest: Manifest) -> list[str]:
    """Files of the rollout side and the loop whose contents changed after they were saved."""
    try:
        return _changed(manifest, digest_pieces(directory, split(manifest.select(trainer=False))))
    except OSError as error:
        return [f"cannot be read: {error}"]


def _changed(manifest: Manifest, found: Mapping[str, str]) -> list[str]:
    return [
        f"{name} is not as it was saved: its digest is {digest}, expected {manifest.digests[name]}"
        for name, digest in found.items()
        if digest != manifest.digests[name]
    ]


def _broken_files(directory: Path, manifest: Manifest) -> list[str]:
    problems = []
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (found := path.stat().st_size) != expected:
            problems.append(f"{name} has {found} bytes, expected {expected}")
    return problems


def _shortened(problems: list[str]) -> list[str]:
    more = [f"{len(problems) - SHOWN} more files are broken"] if len(problems) > SHOWN else []
    return problems[:SHOWN] + more


def _sample(directory: Path) -> str:
    """Digest of a few bytes of every file of weights: training changes them everywhere."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            for part in range(SAMPLES):
                file.seek(size * part // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _differences(saved: JsonObject, model: JsonObject, anyway: Collection[str]) -> list[str]:
    """Compare configs; a field of shapes that one of them leaves to its default is ignored."""
    differ = [
        f"{name} {saved[name]}, not {model[name]}"
        for name in (*SHAPING, *ADAPTING)
        if name in saved and name in model and saved[name] != model[name]
    ]
    if differ:
        return [f"it belongs to another model than --hf-checkpoint: expected what was saved, {', '.join(differ)}"]
    others = differing(saved, model, anyway)
    if not others:
        return []
    return [
        f"--hf-checkpoint is not as it was when this was saved: {'; '.join(others.values())}. Restore it, or if the "
        f"change is meant, add --load-anyway {' '.join(others)}"
    ]


def _advice(checkpoint: Checkpoint) -> str:
    """Name other checkpoints of that run to use instead."""
    others = list_checkpoints(checkpoint.directory.parent)
    earlier = [other.directory for other in others if other.step < checkpoint.step and other.run == checkpoint.run]
    return f"; the one before it is --load {earlier[-1]}" if earlier and checkpoint.run else ""
