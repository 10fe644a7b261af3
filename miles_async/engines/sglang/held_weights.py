"""In the server's process: digests of the parts that a model holds of each loaded tensor.

While a loader runs, ``loader_watch.py`` records where the elements of each tensor went. Later a digest is taken of that
memory, whatever has happened to it since, with each element's place in the tensor as it was sent (``tensor_digest``).
Memory that the digests don't cover is reported as follows:

- A parameter that the model had when it was made must be filled by what is sent: each of its elements was copied from a
  tensor, or is zero (the padding of a vocabulary). Buffers and parameters that come later are exempt: no checkpoint has
  them, since they are computed from the configuration or from loaded tensors. So are those that SGLang marks (EXEMPT).
- A tensor whose memory was replaced after loading (quantized, reordered for a kernel) cannot be compared; neither can
  the tensors that SGLang's loaders compute with (COMPUTED). They are reported as such.

For SGLang 0.5.23, through its own hooks. A tensor that a loader casts or moves before it copies it counts as not held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, UntypedStorage

from miles_async.engines.sglang.held_report import FINGERPRINT_ACTION, REPORT_ACTION, fingerprint, write_report
from miles_async.engines.sglang.hooks import hook
from miles_async.engines.sglang.loader_watch import Copied, LoaderWatch
from miles_async.engines.sglang.region_digest import Region, region_digests
from miles_async.types import HeldPart, HeldWeights, TensorShare

# SGLang's class → parts of the names of tensors that its loader computes with: Gemma multiplies by (1 + weight),
# Nemotron-H by -exp(A_log).
COMPUTED: dict[str, tuple[str, ...]] = {"GemmaForCausalLM": ("norm.weight",), "NemotronHForCausalLM": ("A_log",)}

EXEMPT = "_skip_weight_check"
"""SGLang's mark on parameters that checkpoints need not have: scales of a quantized model's KV cache."""

_CHECK = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"


class WatchedModel:
    """A model whose loads are all watched."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._watch = LoaderWatch()
        self._to_fill = {name for name, each in model.named_parameters() if not hasattr(each, EXEMPT)}
        self._filled: set[str] = set()  # parameters to which a tensor was ever copied
        self._report = ""  # the last one
        model.load_weights = partial(self._load, model.load_weights)  # type: ignore[assignment,arg-type]

    def answer(self, action: str, subject: str) -> str | None:
        """Answer an action of ``held_report.py``; None if it is none of them."""
        if action == FINGERPRINT_ACTION:
            self._report = write_report(self.held(msgspec.json.decode(subject, type=TensorShare)))
            return fingerprint(self._report)
        return self._report if action == REPORT_ACTION else None

    def held(self, share: TensorShare) -> HeldWeights:
        """Report what the model holds now, with digests of the tensors of ``share``."""
        storages = [memory.untyped_storage() for memory in (*self._model.parameters(), *self._model.buffers())]
        live = {storage._cdata: storage for storage in storages}
        memories: dict[str, list[tuple[Copied, Tensor]]] = {}
        other_form = []
        for name, copies in self._watch.copies.items():
            memories[name] = [(copied, memory) for copied in copies if (memory := copied.memory(live)) is not None]
            if len(memories[name]) < len(copies) or (copies and self._is_computed(name)):
                other_form.append(name)
                memories[name] = []
        compared = (pair for name in memories if share.includes(name) for pair in memories[name])
        digests = iter(region_digests(_region(*pair) for pair in compared))
        parts = {
            name: tuple(_part(*pair, next(digests) if share.includes(name) else "") for pair in pairs)
            for name, pairs in memories.items()
        }
        return HeldWeights(parts=parts, other_form=tuple(other_form), unfilled=self._unfilled(live))

    def _is_computed(self, name: str) -> bool:
        return any(part in name for part in COMPUTED.get(type(self._model).__name__, ()))

    def _load(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = self._watch.load(load, *args, **kwargs)
        into = {copied.storage.cdata for copies in self._watch.copies.values() for copied in copies}
        self._filled |= {name for name, parameter in self._parameters() if _storage(parameter) in into}
        return result

    def _unfilled(self, live: Mapping[int, UntypedStorage]) -> dict[str, int]:
        """Parameters with nonzero elements that no tensor was copied to, and the number of these elements."""
        copies: defaultdict[int, dict[Any, Copied]] = defaultdict(dict)
        for copied in (copied for some in self._watch.copies.values() for copied in some):
            copies[copied.storage.cdata][copied.layout] = copied
        result = {}
        for name, parameter in self._parameters():
            here = copies[_storage(parameter)]
            if not here and name in self._filled:
                continue  # replaced
            regions = [memory for copied in here.values() if (memory := copied.memory(live)) is not None]
            if sum(memory.numel() for memory in regions) == parameter.numel():
                continue
            left = int(parameter.count_nonzero()) - sum(int(memory.count_nonzero()) for memory in regions)
            if left:
                result[name] = left
        return result

    def _parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, parameter) for name, parameter in self._model.named_parameters() if name in self._to_fill]


def register() -> None:
    """Add the actions of ``held_report.py`` to the weights checker of every model made from now on."""
    hook("sglang.srt.model_loader.loader._initialize_model", _follow, "AFTER")
    hook("sglang.srt.utils.weight_checker.WeightChecker.handle", _answer)
    hook(_CHECK, _once_per_engine, "AFTER")


def _region(copied: Copied, memory: Tensor) -> Region:
    return Region(memory, copied.origin.offset, copied.origin.strides, copied.origin.row_length)


def _part(copied: Copied, memory: Tensor, digest: str) -> HeldPart:
    dtype = str(memory.dtype).removeprefix("torch.")
    return HeldPart(copied.origin.offset, tuple(memory.shape), copied.origin.strides, dtype, digest)


def _storage(parameter: Tensor) -> int:
    return int(parameter.untyped_storage()._cdata)


def _follow(model: Any, *args: Any, **kwargs: Any) -> None:
    model.watched = WatchedModel(model)


def _answer(handle: Callable[..., Any], checker: Any, action: str, *args: Any, role: str, **kwargs: Any) -> Any:
    name, _, subject = action.partition(" ")
    answer = checker._get_model().watched.answer(name, subject)
    if answer is None:
        return handle(checker, action, *args, role=role, **kwargs)
    return {
        "checksums": {name: answer},  # SGLang passes on a dict of texts
        "per_gpu_checksum": "",  # SGLang fills it in
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


def _once_per_engine(output: Any, *_: object) -> Any:
    """Leave the reports of all ranks to the first group of data-parallel attention: every group would send them."""
    from sglang.srt.runtime_context import get_parallel

    return msgspec.structs.replace(output, payload=None) if get_parallel().attn_dp_rank else output
