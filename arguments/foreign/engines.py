"""Flags of SGLang and smg that the run itself decides: they are not passed on."""

from __future__ import annotations

from miles_async.arguments import Arguments
from miles_async.arguments.foreign.record import Fact, ForeignFlag, Takes
from miles_async.types import JsonObject

_KEYS = (
    "every run makes keys of its own, and keys on a command line can be seen by everybody: to choose them, set "
    "MILES_ASYNC_API_KEY and MILES_ASYNC_ADMIN_KEY in the environment"
)

_METRICS = (
    "the router's metrics have neither a key nor TLS, so they stay on loopback, where the run reads them and "
    "shows them as router/...: remove it"
)

_TLS = "use --tls-certificate, --tls-key and --tls-ca, which are for all servers of the run"


def _refused(flag: str, note: str, takes: Takes = "one") -> ForeignFlag:
    return ForeignFlag(flag=flag, origin="SGLang, smg", verdict="refused", note=note, takes=takes)


def _pipeline_parallel(flag: str) -> ForeignFlag:
    return ForeignFlag(
        flag=flag, origin="SGLang, smg", verdict="noted", only=("1",),
        note="engines of several pipeline stages would go on generating while they are paused for new weights (SGLang "
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
        note=f"is `{flag}-decode`: SGLang tells the graphs of decoding from those of prefills",
    )  # fmt: skip


ENGINES: tuple[ForeignFlag, ...] = (
    _of_decoding("--sglang-cuda-graph-bs", "many"),
    _of_decoding("--sglang-cuda-graph-max-bs", "one"),
    _tensor_parallel("--sglang-tp"),
    _tensor_parallel("--sglang-tp-size"),
    _tensor_parallel("--sglang-tensor-parallel-size"),
    _pipeline_parallel("--sglang-pp-size"),
    _pipeline_parallel("--sglang-pipeline-parallel-size"),
    _refused("--sglang-model-path", "use --hf-checkpoint"),
    _refused("--sglang-tokenizer-path", "the tokenizer comes with --hf-checkpoint"),
    _refused("--sglang-host", "addresses of engines are chosen by the run: remove it"),
    _refused("--sglang-enable-memory-saver", "--colocate switches it on", "nothing"),
    _refused("--sglang-nnodes", "use --rollout-num-nodes-per-engine"),
    _refused("--sglang-node-rank", "use --rollout-num-nodes-per-engine"),
    _refused("--sglang-dist-init-addr", "addresses of engines are chosen by the run: remove it"),
    _refused("--sglang-port", "ports of engines are chosen by the run: remove it"),
    _refused(
        "--sglang-preferred-sampling-params",
        "the trainer's log-probs assume the run's own sampling parameters: use --rollout-temperature",
    ),
    _refused("--sglang-weight-version", "versions are counted by the run: remove it"),
    _refused("--sglang-api-key", _KEYS),
    _refused("--sglang-admin-api-key", _KEYS),
    _refused("--router-api-key", _KEYS),
    _refused("--router-tenant-api-key", _KEYS, "many"),
    _refused("--router-control-plane-api-keys", _KEYS, "many"),
    _refused("--sglang-ssl-certfile", _TLS),
    _refused("--sglang-ssl-keyfile", _TLS),
    _refused("--sglang-ssl-ca-certs", _TLS),
    _refused("--router-tls-cert-path", _TLS),
    _refused("--router-tls-key-path", _TLS),
    _refused("--router-ca-cert-paths", _TLS, "many"),
    _refused("--router-policy", "use --sglang-router-policy"),
    _refused("--router-port", "use --sglang-router-port"),
    _refused("--router-host", "the address of the router is chosen by the run: remove it"),
    _refused("--router-prometheus-host", _METRICS),
    _refused("--router-prometheus-port", _METRICS),
    _refused("--router-worker-urls", "engines are registered by the run: remove it", "many"),
)
