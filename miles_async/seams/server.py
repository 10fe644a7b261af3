"""One inference server, as the engines package calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from miles_async.arguments.weights import PauseMode
from miles_async.types import (
    CanaryScore,
    EngineLoad,
    GenerateRequest,
    Generation,
    GroupBackend,
    HeldWeights,
    Int32,
    TensorMeta,
    TensorShare,
)

TokenVersions = Callable[[object, object, int], Int32]
"""(spans as reported or None, version label as reported or None, number of output tokens) → version of each token, by
``staleness.versions.token_versions``. Raises VersionUnknownError.
"""


class InferenceServer(Protocol):
    """One kind of inference server (``engines/sglang``): the requests that a run sends to such a server, and what its
    answers mean.

    Generation goes through the router, so only its path, body and answer are described here. Every other method calls
    the server at ``url`` directly and raises EngineError with the server's own words, EngineTimeoutError if there is no
    answer within ``timeout`` seconds.
    """

    generate_path: str  # of generation requests, such as "/generate"

    def encode(self, request: GenerateRequest, *, request_id: str, version: int, experts: bool) -> bytes:
        """Body of a generation request. It must not reuse cached prefixes of requests with another ``version``.
        ``experts``: ask for the experts of the tokens from ``experts_from`` on.
        """
        ...

    def decode(self, body: bytes, content_type: str, url: str, versions: TokenVersions) -> Generation:
        """Read the answer to a generation request. Raises TransientEngineError, naming ``url``, if it is unusable, and
        what ``versions`` raises.

        ``versions``: makes ``weight_versions`` of what the server reports. ``engines`` is left to the caller, and
        ``routed_experts`` may be flat.
        """
        ...

    async def abort(self, url: str, request_id: str, timeout: float) -> None:
        """End one request. No-op if the server does not have it."""
        ...

    async def abort_all(self, url: str, timeout: float) -> None: ...

    # State
    async def weight_version(self, url: str, timeout: float) -> str:
        """Version of the weights that the server claims to hold. Answered at once, paused or not."""
        ...

    async def probe(self, url: str, timeout: float) -> int:
        """Wait until every process of the server has answered, paused or not. Returns the number of tokens of one
        request that a forward pass may yield: 1 without speculative decoding.
        """
        ...

    async def make_progress(self, url: str, timeout: float) -> None:
        """Wait until a token was generated after this call; an idle server generates one for it. Not while paused."""
        ...

    async def load(self, url: str, timeout: float) -> EngineLoad: ...

    async def score(self, url: str, tokens: Sequence[int], timeout: float, *, first: int = 1) -> CanaryScore:
        """Log-probs of tokens[first:] at temperature 1, computed without cached prefixes beyond those before ``first``.
        Not while paused. Raises RequestRejectedError for tokens that the server cannot score.
        """
        ...

    async def report_weights(self, url: str, share: TensorShare, timeout: float) -> str:
        """Have the server write a report of the weights that it holds, with digests of a share of them. Returns the
        report's fingerprint, which is the same for servers that report the same.
        """
        ...

    async def held_weights(self, url: str, report: str, timeout: float) -> HeldWeights:
        """Read the server's last report. Raises EngineError if its fingerprint is not ``report``."""
        ...

    # Publication: pause → weights by one of the ways below → resume.
    async def pause(self, url: str, mode: PauseMode, timeout: float) -> None: ...

    async def resume(self, url: str, timeout: float) -> None: ...

    async def flush_cache(self, url: str, timeout: float) -> None:
        """Forget all cached prefixes. Raises EngineError while requests use them."""
        ...

    async def release_memory(self, url: str, timeout: float) -> None:
        """Free the GPU's memory while the server is paused: weights and cache are lost."""
        ...

    async def retake_memory(self, url: str, timeout: float) -> None:
        """Undo :meth:`release_memory`, with any weights: it generates after the next publication."""
        ...

    async def join_group(
        self,
        url: str,
        first_rank: int,
        group_name: str,
        address: str,
        port: int,
        world_size: int,
        backend: GroupBackend,
        timeout: float,
    ) -> None:
        """Join a torch process group with the server's ranks, which are ``first_rank`` and those after it."""
        ...

    async def leave_group(self, url: str, group_name: str, timeout: float) -> None: ...

    async def receive_stream(self, url: str, group_names: Sequence[str], version: int, timeout: float) -> None:
        """Receive and load, as one update, what the senders (rank 0) of these process groups send. Each of them first
        announces its buckets, by broadcasts of an int64 and as many bytes of MessagePack (``StagedWeights.buckets``).
        Then each bucket is one uint8 tensor: over NCCL a broadcast, over gloo sent to rank 1 with tag 0, which passes
        it on to the others. Buckets have to be received in the order of their indices. Only for
        ``EngineKind.streams``.
        """
        ...

    async def begin_update(self, url: str, timeout: float) -> None: ...

    async def receive_bucket(
        self,
        url: str,
        group_name: str,
        tensors: Sequence[TensorMeta],
        version: int,
        timeout: float,
    ) -> None:
        """Receive one broadcast with the bytes of ``tensors``, one after another."""
        ...

    async def receive_handles(self, url: str, handles: str, ranks: int, version: int, timeout: float) -> None:
        """Load one bucket from device memory that the server's ``ranks`` share with the sender."""
        ...

    async def end_update(self, url: str, timeout: float) -> None:
        """Post-process the weights received since :meth:`begin_update`."""
        ...

    async def load_files(self, url: str, directory: str, version: int, timeout: float) -> None:
        """Replace the tensors of all safetensors files of ``directory``, which is on the server's host. Needs no
        :meth:`begin_update` and :meth:`end_update`.
        """
        ...
