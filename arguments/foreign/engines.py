"""Flags of SGLang and smg that the run itself decides: they are not passed on."""

from __future__ import annotations

from functools import partial

from miles_async.arguments import Arguments
from miles_async.arguments.foreign.record import Fact, ForeignFlag, renamed, rows
from miles_async.types import JsonObject

_KEYS = (
    "every run makes its own keys, and everybody can see keys on a command line: to choose them, set "
    "MILES_ASYNC_API_KEY and MILES_ASYNC_ADMIN_KEY in the environment"
)

_METRICS = (
    "the router's metrics have neither a key nor TLS, so they stay on loopback, where the run reads them and "
    "shows them as router/...: remove it"
)

_DECODING = ": SGLang distinguishes the graphs of decoding and prefills"
_RENAMED = ": SGLang renamed it"
_REPLIES = ": SGLang's parsers run where turns are made messages, not in its servers"

_noted = partial(rows, "noted", origin="SGLang, smg")
_refused = partial(rows, "refused", origin="SGLang, smg")
_works = partial(renamed, origin="SGLang, smg")


def _tensor_parallel(flag: str) -> ForeignFlag:
    def fact(arguments: Arguments, _: JsonObject) -> Fact:
        gpus = arguments.cluster.rollout_num_gpus_per_engine
        return Fact(gpus, f"--rollout-num-gpus-per-engine, which is an engine's tensor-parallel size, is {gpus}")

    return ForeignFlag(
        flag=flag, origin="SGLang, smg", verdict="checked", fact=fact,
        note="must be `--rollout-num-gpus-per-engine`, which is an engine's tensor-parallel size",
    )  # fmt: skip


ENGINES: tuple[ForeignFlag, ...] = (
    _works("--sglang-cuda-graph-bs", "--sglang-cuda-graph-bs-decode", takes="many", why=_DECODING),
    _works("--sglang-cuda-graph-max-bs", "--sglang-cuda-graph-max-bs-decode", why=_DECODING),
    *(_works(f"--sglang-nsa-{part}-backend", f"--sglang-dsa-{part}-backend", why=_RENAMED)
      for part in ("prefill", "decode")),
    _works("--sglang-mamba-scheduler-strategy", "--sglang-mamba-radix-cache-strategy", why=_RENAMED),
    *map(_tensor_parallel, ("--sglang-tp", "--sglang-tp-size", "--sglang-tensor-parallel-size")),
    *_noted("engines of several pipeline stages would keep generating while they are paused for new weights (SGLang "
            "0.5.23); use --rollout-num-gpus-per-engine, their tensor-parallel size",
            one="sglang-pp-size sglang-pipeline-parallel-size", only=("1",)),
    _works("--sglang-tool-call-parser", "--tool-call-parser", why=_REPLIES),
    _works("--sglang-reasoning-parser", "--reasoning-parser", why=_REPLIES),
    *_refused("use --hf-checkpoint", one="sglang-model-path"),
    *_refused("the tokenizer comes with --hf-checkpoint", one="sglang-tokenizer-path"),
    *_refused("addresses of engines are chosen by the run: remove it", one="sglang-host sglang-dist-init-addr"),
    *_refused("--colocate switches it on", switches="sglang-enable-memory-saver"),
    *_refused("use --rollout-num-nodes-per-engine", one="sglang-nnodes sglang-node-rank"),
    *_refused("ports of engines are chosen by the run: remove it", one="sglang-port sglang-nccl-port"),
    *_refused("the trainer's log-probs assume the run's own sampling parameters: use --rollout-temperature",
            one="sglang-preferred-sampling-params"),
    *_refused("versions are counted by the run: remove it", one="sglang-weight-version"),
    *_refused(_KEYS, one="sglang-api-key sglang-admin-api-key router-api-key",
            many="router-tenant-api-key router-control-plane-api-keys"),
    *_refused("use --tls-certificate, --tls-key and --tls-ca, which are for all servers of the run",
            one="sglang-ssl-certfile sglang-ssl-keyfile sglang-ssl-ca-certs router-tls-cert-path router-tls-key-path",
            many="router-ca-cert-paths"),
    *_refused("use --sglang-router-policy", one="router-policy"),
    *_refused("use --sglang-router-port", one="router-port"),
    *_refused("the address of the router is chosen by the run: remove it", one="router-host"),
    *_refused(_METRICS, one="router-prometheus-host router-prometheus-port"),
    *_refused("engines are registered by the run: remove it", many="router-worker-urls"),
)  # fmt: skip
