"""In the server's process: attention on a CPU, for many requests at once and new tokens only.

SGLang (0.5.23) goes through the requests of a batch one by one, in every layer. It collects the keys and values of
each, so a common prefix once per request; and where a prompt is extended it computes the attention of cached tokens as
well, and discards it. Here a common prefix is collected once, and requests of about the same size are computed together
(docs/benchmarks.md). It also leaves out softcapping of scores (Gemma 2), which is done here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from miles_async.engines.sglang.hooks import hook

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_AT_ONCE = 1 << 19  # most elements of a tensor while requests are computed together, so that a core's caches hold it
_PADDING = 2  # most products of queries and keys computed ÷ products needed


def register() -> None:
    """Patch backends created from now on."""
    for name in ("forward_extend", "forward_decode"):
        hook(f"{_BACKEND}.{name}", _note_layer)
    hook(f"{_BACKEND}.__init__", _pad_with_one_token, "AFTER")
    hook(f"{_BACKEND}._run_sdpa_forward_extend", _extend)
    hook(f"{_BACKEND}._run_sdpa_forward_decode", _decode)


def _pad_with_one_token(result: None, backend: Any, *_: object, **__: object) -> None:
    # The length of requests that ranks with data-parallel attention pad a batch with; Intel's backend has the same.
    backend.get_cpu_graph_seq_len_fill_value = lambda: 1


def _note_layer(original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    # The functions below don't receive the layer.
    backend.miles_async_softcap = layer.logit_cap
    windowed = backend.use_sliding_window_kv_pool and backend.token_to_kv_pool.layers_mapping[layer.layer_id][1]
    backend.miles_async_places = backend.token_to_kv_pool.full_to_swa_index_mapping if windowed else None
    return original(backend, q, k, v, layer, *args, **kwargs)


def _extend(original: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    *tensors, _, new, encoder_lens = args
    if encoder_lens is not None or not kwargs["causal"]:  # tokens look at an encoder's, or ahead
        return original(backend, *args, **kwargs)
    return _attend(backend, *tensors, new, **kwargs)


def _decode(original: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    *tensors, encoder_lens = args
    if encoder_lens is not None:
        return original(backend, *args, **kwargs)
    return _attend(backend, *tensors, torch.ones_like(tensors[-1]), **kwargs)  # of each request one new token


def _attend(
    backend: Any, *tensors: Tensor, scaling: float | None, sliding_window_size: int | None, **_: object
) -> Tensor:
    layer = {"softcap": backend.miles_async_softcap, "places_of": backend.miles_async_places}
    return attend(*tensors, scaling=scaling, window=sliding_window_size, **layer)


def attend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float = 0.0,
    places_of: Tensor | None = None,
) -> Tensor:
    """Fill ``output`` and return it: for each new token, the attention to itself and the tokens before it.

    Arguments as of SGLang's ``_run_sdpa_forward_extend``. ``query``: [new tokens, heads, head size], the tokens
    of all requests one after another. The caches have the keys and values of these tokens, too. ``window``: how many
    tokens before itself a token sees; None: all. ``softcap`` of scores: softcap · tanh(score / softcap); 0: none.
    ``places_of``: where the caches have each place of ``req_to_token``, if layers with a window have a cache of their
    own (Gemma 4); None: there.
    """
    new, lengths = extend_seq_lens.long(), seq_lens.long()
    cached, first = lengths - new, new.cumsum(0) - new
    slots = req_to_token[req_pool_indices, : int(lengths.max())]
    if places_of is not None:
        slots = places_of[slots]  # slots of tokens behind the window may be reused by now
    common = _in_common(slots[:, : int(cached.min())]) if len(slots) > 1 and window is None else 0
    first_keys, first_values = (_heads_first(held, slots[:1, :common])[0] for held in (k_cache, v_cache))
    for some in map(torch.tensor, _alike(new.tolist(), lengths.tolist(), common, query.shape[1:])):
        alone = len(some) == 1
        # Pad by repeating the last token, as a query and as a key.
        tokens = torch.arange(int(new[some].max())).minimum(new[some, None] - 1)
        places = torch.arange(0 if alone else common, int(lengths[some].max()))
        rows, held = first[some, None] + tokens, slots[some[:, None], places.minimum(lengths[some, None] - 1)]
        asked, keys, values = (_heads_first(*each) for each in ((query, rows), (k_cache, held), (v_cache, held)))
        at = cached[some, None] + tokens
        if softcap or not alone:
            shared = 0 if alone else common
            shared_keys, shared_values = first_keys[:, :shared], first_values[:, :shared]
            sees = _sees(at, places, window)
            mixed = _together(asked, keys, values, sees, shared_keys, shared_values, scaling, softcap)
        elif int(cached[some]) == 0 and window is None:
            mixed = _alone(asked, keys, values, None, scaling)  # a long prompt's mask would be large
        else:
            mixed = _alone(asked, keys, values, _sees(at, places, window), scaling)
        output[rows] = mixed.transpose(1, 2)
    return output


def _in_common(slots: Tensor) -> int:
    """Number of leading columns that are equal in all rows."""
    return int((slots == slots[0]).all(0).long().cumprod(0).sum())


def _alike(new: list[int], lengths: list[int], common: int, query: Sequence[int]) -> Iterator[list[int]]:
    """Requests to be computed together. ``common``: how many tokens all begin with. ``query``: heads, head size."""
    some: list[int] = []
    needed = longest = 0
    for request in sorted(range(len(new)), key=lambda request: (new[request], lengths[request])):
        asks, own = new[request], lengths[request] - common
        needed, longest = needed + asks * own, max(longest, own)
        count = len(some) + 1
        elements = count * query[0] * max(asks * (common + longest), longest * query[1], asks * query[1])
        if some and (elements > _AT_ONCE or count * asks * longest > _PADDING * needed):
            yield some
            some, needed, longest = [], asks * own, own
        some.append(request)
    yield some


def _heads_first(held: Tensor, places: Tensor) -> Tensor:
    """``held`` [all places, heads, head size] at ``places`` [requests, n], as [requests, heads, n, head size]."""
    found = held.flatten(1).index_select(0, places.flatten())  # several times as fast as held[places]
    return found.view(*places.shape, *held.shape[1:]).transpose(1, 2)


def _sees(at: Tensor, places: Tensor, window: int | None) -> Tensor:
    """Mask: which of ``places`` [m] a token ``at`` each place [requests, n] sees, bool [requests, 1, n, m]."""
    sees = places <= at[:, None, :, None]
    return sees if window is None else sees & (places >= at[:, None, :, None] - window)


def _alone(query: Tensor, keys: Tensor, values: Tensor, sees: Tensor | None, scaling: float | None) -> Tensor:
    """One request's attention, however long it is. ``sees``: None if nothing of it was cached."""
    return scaled_dot_product_attention(
        query,
        keys.to(query.dtype),
        values.to(query.dtype),
        attn_mask=sees,
        is_causal=sees is None,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def _together(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sees: Tensor,
    first_keys: Tensor,
    first_values: Tensor,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """The attention of several requests to their own tokens and to their common prefix, which all of them see.

    ``query``: [requests, heads, n, head size]; ``keys``, ``values``: [requests, kv heads, m, head size], and of their
    common prefix [kv heads, common tokens, head size].
    """
    requests, heads, n, size = query.shape
    scaled = query.float() * (size**-0.5 if scaling is None else scaling)
    scaled = scaled.reshape(requests, len(first_keys), -1, size)  # [requests, kv heads, heads of each × n, head size]
    own = scaled @ keys.float().contiguous().mT  # it would be copied transposed, more slowly
    own = _capped(own, softcap).masked_fill(~sees.repeat(1, 1, own.shape[2] // n, 1), -torch.inf)
    first = _capped(torch.einsum("rkqd,kpd->rkqp", scaled, first_keys.float()), softcap)
    weights = torch.cat([first, own], -1).softmax(-1)
    to_first, to_own = weights.split([first.shape[-1], own.shape[-1]], -1)
    mixed = to_own @ values.float().contiguous() + torch.einsum("rkqp,kpd->rkqd", to_first, first_values.float())
    return mixed.view(requests, heads, n, -1).to(query.dtype)


def _capped(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores
