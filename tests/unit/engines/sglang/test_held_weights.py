"""A model's report of the weights that it holds, with a loader that copies tensors and code that replaces them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from miles_async.engines.sglang.held_report import FINGERPRINT_ACTION, REPORT_ACTION, fingerprint, read_reports
from miles_async.engines.sglang.held_weights import WatchedModel
from miles_async.runtime.tensor_digest import digest, total
from miles_async.types import TensorShare

Given = Iterable[tuple[str, torch.Tensor]]
ALL = TensorShare()


class Fused(torch.nn.Module):
    """Holds q and k in one parameter with room for a third row of k."""

    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(rows, 4), requires_grad=False)
        self.register_buffer("rotary", torch.ones(8))

    def load_weights(self, weights: Given) -> None:
        for name, tensor in weights:
            self.qk.data[:4].copy_(tensor) if name == "q" else self.qk.data[4:6].copy_(tensor)


WEIGHTS = {"q": torch.randn(4, 4), "k": torch.randn(2, 4)}


def whole(tensor: torch.Tensor) -> str:
    return digest(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.itemsize, tensor.shape)


EXPECTED = {name: whole(tensor) for name, tensor in WEIGHTS.items()}


def found(watched: WatchedModel, share: TensorShare = ALL) -> dict[str, str]:
    """Total digests of what is held; "" where nothing is."""
    parts = watched.held(share).parts
    return {name: total(part.digest for part in some) if some else "" for name, some in parts.items()}


def filled(model: Fused) -> WatchedModel:
    """Watch the model, and load WEIGHTS into it."""
    watched = WatchedModel(model)
    model.load_weights(WEIGHTS.items())
    return watched


def test_parts_of_a_fused_parameter_are_what_was_loaded() -> None:
    # covers: C8
    model = Fused()
    watched = WatchedModel(model)
    for _ in range(2):  # as publications do, again and again
        model.load_weights(WEIGHTS.items())
        assert found(watched) == EXPECTED
        assert watched.held(ALL).unfilled == {}
    model.qk.data[5, 1] += 1
    assert found(watched) == {"q": EXPECTED["q"], "k": found(watched)["k"]}
    assert found(watched)["k"] != EXPECTED["k"]


def test_a_share_has_digests_of_its_tensors_and_tells_where_all_are() -> None:
    watched = filled(Fused())
    shares = [TensorShare(index, 4) for index in range(4)]
    for name in WEIGHTS:
        [mine] = [share for share in shares if share.includes(name)]
        for share in shares:
            [part] = watched.held(share).parts[name]
            assert part.digest == (EXPECTED[name] if share == mine else "")


def test_a_report_is_kept_under_its_fingerprint_until_the_next_one() -> None:
    # covers: C8
    watched, other = filled(first := Fused()), WatchedModel(second := Fused())
    second.load_weights(reversed(WEIGHTS.items()))
    share = msgspec.json.encode(ALL).decode()
    expected = watched.answer(FINGERPRINT_ACTION, share)
    assert expected == other.answer(FINGERPRINT_ACTION, share)
    first.qk.data[5, 1] += 1
    report = watched.answer(REPORT_ACTION, "")
    assert report is not None
    assert fingerprint(report) == expected
    assert read_reports([report]) == other.held(ALL)
    assert watched.answer(FINGERPRINT_ACTION, share) != expected
    assert watched.answer("checksum", "") is None


def test_memory_replaced_after_loading_is_reported_and_not_kept_alive() -> None:
    # covers: M16
    watched = filled(model := Fused())
    loaded = StorageWeakRef(model.qk.untyped_storage())
    model.qk.data = model.qk.data.to(torch.int8)
    model.scale = torch.nn.Parameter(torch.ones(6))  # a quantization's own
    assert loaded.expired()
    assert found(watched) == {"q": "", "k": ""}
    held = watched.held(ALL)
    assert (held.other_form, held.unfilled) == (("q", "k"), {})


def test_memory_that_shrank_is_not_read() -> None:
    watched = filled(model := Fused())
    model.qk.untyped_storage().resize_(4 * 4 * 4)
    assert found(watched) == {"q": EXPECTED["q"], "k": ""}


def test_memory_that_nothing_was_sent_for_is_reported_unless_it_is_padding() -> None:
    # covers: C8
    model = Fused(rows=9)
    model.never = torch.nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
    watched = filled(model)
    assert watched.held(ALL).unfilled == {"never": 5}
    model.never.data.zero_()
    assert watched.held(ALL).unfilled == {}
    model.qk.data[7, :3] = 1.0
    assert watched.held(ALL).unfilled == {"qk": 3}


def test_what_sglang_exempts_from_its_own_check_need_not_be_sent() -> None:
    model = Fused()
    model.k_scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
    model.k_scale._skip_weight_check = True  # as SGLang marks it
    watched = filled(model)
    assert watched.held(ALL).unfilled == {}


def test_a_tied_layer_is_filled_by_the_embedding() -> None:
    model = Fused()
    model.tied = torch.nn.Parameter(model.qk.data, requires_grad=False)  # another parameter, the same memory
    watched = filled(model)
    assert watched.held(ALL).unfilled == {}


def joined_first(model: Fused, weights: Given) -> None:
    """As SGLang's loader of DeepSeek-V3 joins q_a_proj and kv_a_proj_with_mqa."""
    given = dict(weights)
    joined = torch.cat([given["q"], given["k"]], dim=0)
    model.qk.data.copy_(joined)


def by_index(model: Fused, weights: Given) -> None:
    """SGLang's loader of convolutions."""
    for name, tensor in weights:
        part = (slice(0, 4), ...) if name == "q" else (slice(4, 6), ...)
        model.qk.data[part] = tensor[:]


def in_threads(model: Fused, weights: Given) -> None:
    """Copied when the loader has gone on to other tensors."""
    threads = []
    for name, tensor in weights:
        memory = model.qk.data[:4] if name == "q" else model.qk.data[4:]
        threads.append(threading.Thread(target=memory.copy_, args=(tensor,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def discards(model: Fused, weights: Given) -> None:
    list(weights)


@pytest.mark.parametrize("load", [joined_first, by_index, in_threads])
def test_loaders_that_join_or_wait_are_followed(load: Callable[[Fused, Given], None]) -> None:
    model = Fused()
    model.load_weights = lambda weights: load(model, weights)  # type: ignore[method-assign,assignment]
    watched = filled(model)
    assert found(watched) == EXPECTED


def test_a_loader_that_discards_its_tensors_holds_nothing_of_them() -> None:
    # covers: C8
    model = Fused()
    model.qk.data.normal_()
    model.load_weights = lambda weights: discards(model, weights)  # type: ignore[method-assign,assignment]
    watched = filled(model)
    assert found(watched) == {"q": "", "k": ""}
    held = watched.held(ALL)
    assert (held.other_form, held.unfilled) == ((), {"qk": 24})


class GemmaForCausalLM(Fused):
    """Named like SGLang's, whose loader adds 1 to norms in place."""

    def load_weights(self, weights: Given) -> None:
        super().load_weights((name, tensor.add_(1.0) if "norm.weight" in name else tensor) for name, tensor in weights)


def test_tensors_that_a_loader_is_known_to_compute_with_are_reported() -> None:
    # covers: M16
    model = GemmaForCausalLM()
    watched = WatchedModel(model)
    model.load_weights([("q", WEIGHTS["q"]), ("norm.weight", WEIGHTS["k"].clone())])
    held = watched.held(ALL)
    assert (held.other_form, held.unfilled) == (("norm.weight",), {})
    assert found(watched) == {"q": EXPECTED["q"], "norm.weight": ""}
    model.load_weights = lambda weights: discards(model, weights)  # type: ignore[method-assign,assignment]
    watched = WatchedModel(model)
    model.load_weights([("norm.weight", WEIGHTS["k"])])
    assert watched.held(ALL).other_form == (), "never copied is not kept in another form"
