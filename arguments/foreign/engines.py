"""Flags of SGLang and smg that the run itself decides: they are not passed on."""

from __future__ import annotations

from functools import partial

from miles_async.arguments import Arguments
from miles_async.arguments.foreign.record import Fact, ForeignFlag, Takes, rows
from miles_async.types import JsonObject

_KEYS = (
    "every run makes its own keys, and everybody can see keys on a command line: to choose them, set "
    "MILES_ASYNC_API_KEY and MILES_ASYNC_ADMIN_KEY in the environment"
)

_METRICS = (
    "the router's metrics have neither a key nor TLS, so they stay on loopback, where the run reads them and "
    "shows them as router/...: remove it"
)

_refused = partial(rows, "refused", origin="SGLang, smg")


def _pipeline_parallel(flag: str) -> ForeignFlag:
    return ForeignFlag(
        flag=flag, origin="SGLang, smg", verdict="noted", only=("1",),
        note="engines of several pipeline stages would keep generating while they are paused for new weights (SGLang "
        "0.5.23); use --rollout-num-gpus-per-engine, their tensor-parallel size",
    )  # fmt: skip


def _tensor_parallel(flag: str) -> ForeignFlag:
    def fact(arguments: Arguments, _: JsonObject) -> Fact:
        gpus = arguments.cluster.rollout_num_gpus_per_engine
        return Fact(gpus, f"--rollout-num-gpus-per-engine, which is an engine's tensor-parallel size, is {gpus}")

    return ForeignFlag(
        flag=flag, origin="SGLang, smg", verdict="checked", fact=fact,
        note="must be `--rollout-num-gpus-per-engine`, which is an engine's tensor-parallel size",
    )  # fmt: skip


def _of_decoding(flag: str, takes: Takes) -> ForeignFlag:
    return ForeignFlag(
        flag=flag, origin="SGLang, smg", verdict="works", takes=takes, ours=(f"{flag}-decode",),
        note=f"is `{flag}-decode`: SGLang distinguishes the graphs of decoding and prefills",
    )  # fmt: skip


def _of_replies(name: str) -> ForeignFlag:
    return ForeignFlag(
        flag=f"--sglang-{name}", origin="SGLang, smg", verdict="works", ours=(f"--{name}",),
        note=f"is `--{name}`: SGLang's parsers run where turns are made messages, not in its servers",
    )  # fmt: skip


ENGINES: tuple[ForeignFlag, ...] = (
    _of_decoding("--sglang-cuda-graph-bs", "many"),
    _of_decoding("--sglang-cuda-graph-max-bs", "one"),
    _tensor_parallel("--sglang-tp"),
    _tensor_parallel("--sglang-tp-size"),
    _tensor_parallel("--sglang-tensor-parallel-size"),
    _pipeline_parallel("--sglang-pp-size"),
    _pipeline_parallel("--sglang-pipeline-parallel-size"),
    _of_replies("tool-call-parser"),
    _of_replies("reasoning-parser"),
    *_refused("use --hf-checkpoint", one="sglang-model-path"),
    *_refused("the tokenizer comes with --hf-checkpoint", one="sglang-tokenizer-path"),
    *_refused("addresses of engines are chosen by the run: remove it", one="sglang-host sglang-dist-init-addr"),
    *_refused("--colocate switches it on", switches="sglang-enable-memory-saver"),
    *_refused("use --rollout-num-nodes-per-engine", one="sglang-nnodes sglang-node-rank"),
    *_refused("ports of engines are chosen by the run: remove it", one="sglang-port"),
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
