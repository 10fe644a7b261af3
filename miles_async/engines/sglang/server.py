"""The command, the environment and the readiness of an SGLang server."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import aiohttp

from miles_async.arguments.server_groups import has_attention_groups
from miles_async.engines.http import Http
from miles_async.engines.kind import ServerSpec
from miles_async.engines.sglang import HELD_WEIGHTS_VARIABLE, WEIGHT_GROUP_SECONDS_VARIABLE
from miles_async.engines.sglang.cpu.memory import memory_flags
from miles_async.errors import ConfigurationError
from miles_async.runtime.files.private import make_private

_KEEP_ALIVE_SECONDS = "86400"  # closing a connection of the router's just as a request comes fails the request

# SGLang's watchdog kills a server whose scheduler has work and has finished no batch for as long. This is its default,
# meant for a batch that hangs: a publication that holds the scheduler up comes on top.
_BATCH_SECONDS = 300

SHARED_GPU_FRACTION = 0.7
"""Share of a GPU for weights and cache where trainer ranks are on it, too (``--colocate``), as in slime's recipes."""

_GROUPS_PORTS = (*range(1, 7), 13)

_CPU_FLAGS = (
    # Without these SGLang does not run on a CPU.
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    # The samples of a group have one prompt and come together, also after a pause that took them out of the engine.
    # This policy puts requests first whose prompt is cached; cpu/prefills.py has one of them compute it. Prefills
    # are small: an engine never computes long without listening.
    "--schedule-policy=lpm",
    "--chunked-prefill-size=512",
)


def server_command(
    spec: ServerSpec, host: str, port: int, rendezvous: tuple[str, int], seed: int, node: int
) -> list[str]:
    """Interpreter arguments that start the server. Later ones win, and the user's come last."""
    command = [
        "-m",
        "miles_async.engines.sglang.launcher",
        f"--model-path={spec.model_path}",
        f"--host={host}",
        f"--port={port}",
        f"--device={spec.device}",
        f"--dtype={spec.dtype}",
        f"--tp-size={spec.tensor_parallel_size}",
        f"--random-seed={seed % 2**32}",  # numpy takes no larger one
        f"--grammar-backend={'xgrammar' if spec.grammars else 'none'}",
        f"--watchdog-timeout={_BATCH_SECONDS + spec.publication_seconds:g}",
        "--skip-server-warmup",  # the canary of the first publication is its warm-up
        "--log-level=warning",
    ]
    if not has_attention_groups(spec.extra):
        # Else each scheduler spins on a core. With attention groups a request to all schedulers would wake the first
        # one only, and wait a second for the others.
        command.append("--sleep-on-idle")
    if spec.trust_remote_code:
        command.append("--trust-remote-code")
    address, rendezvous_port = rendezvous
    command.append(f"--dist-init-addr={address}:{rendezvous_port}")
    if spec.nodes > 1:
        command += [f"--nnodes={spec.nodes}", f"--node-rank={node}"]
    if (tls := spec.network.tls) is not None:
        command += [f"--ssl-certfile={tls.certificate}", f"--ssl-keyfile={tls.key}"]
        command += [f"--ssl-ca-certs={tls.ca}"] if tls.ca else []  # its calls of itself verify, too
    if spec.dummy_weights:
        # A draft model for speculative decoding gets no publications: it keeps what its checkpoint has.
        command += ["--load-format=dummy", "--speculative-draft-load-format=auto"]
    if spec.model_overrides:
        command.append(f"--json-model-override-args={json.dumps(spec.model_overrides)}")
        if spec.model_overrides.get("quantization_config", {}) is None:
            command.append("--quantization=unquant")  # else, on Blackwell, it goes by the files of DeepSeek-V3
    if spec.routed_experts:
        command.append("--enable-return-routed-experts")
    if spec.weight_version is not None:
        command.append(f"--weight-version={spec.weight_version}")
    if spec.gpus:
        # What a rank keeps while engines have the GPU (CUDA's context, NCCL's buffers) is not in SGLang's own choice.
        command += ["--enable-memory-saver", f"--mem-fraction-static={SHARED_GPU_FRACTION}"]
    if spec.device == "cpu":
        command += _CPU_FLAGS
        command += memory_flags(
            spec.model_path,
            spec.dtype,
            longest=spec.longest_sample,
            running=spec.concurrency,
            engines=spec.engines_on_host,
        )
    return [*command, *spec.extra]


def above_rendezvous(spec: ServerSpec) -> Sequence[int]:
    """Distances from the port of ``--dist-init-addr`` to those by which SGLang's processes reach the scheduler of each
    attention group (0.5.23: ``PortArgs.init_new``, DP_ATTENTION_HANDSHAKE_PORT_DELTA).
    """
    return _GROUPS_PORTS if has_attention_groups(spec.extra) else ()


def _compiled_kernels() -> str:
    """The directory that torch chooses itself, if it is this user's: what is in it is loaded and run."""
    path = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    try:
        make_private(path)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; name another by TORCHINDUCTOR_CACHE_DIR") from error
    return str(path)


def server_environment(spec: ServerSpec) -> dict[str, str]:
    """Variables to add to the environment of the server."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_TIMEOUT_KEEP_ALIVE": _KEEP_ALIVE_SECONDS,
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",  # log-probs at the sampling temperature, as the trainer's are
        # The router asks for /health twice before it takes an engine, and by default each answer takes a second.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    # A server whose scheduler or detokenizer has died ends at once, rather than after a minute of dumps.
    for dump in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        environment[dump] = os.environ.get(dump, "false")
    # Gated delta nets keep inputs of their convolution, by default in bfloat16, which would round fp32 ones.
    environment["SGLANG_MAMBA_CONV_DTYPE"] = spec.dtype
    # What a vision tower made of an image is kept beyond publications, though other weights made it.
    environment["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    if ("--dsa-topk-backend", "torch") in pairwise(part for word in spec.extra for part in word.split("=", 1)):
        environment["SGLANG_DSA_FUSE_TOPK"] = "false"  # fused kernels have a top-k of their own
    if spec.device == "cpu":
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        # Ranks of one engine look at the same memory one after the other, while neighbours take theirs.
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    elif "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # compiled kernels outlive a server, unlike its other files
        environment["TORCHINDUCTOR_CACHE_DIR"] = _compiled_kernels()
    if spec.held_weights:
        environment[HELD_WEIGHTS_VARIABLE] = "1"
    if spec.weight_group_seconds is not None:
        environment[WEIGHT_GROUP_SECONDS_VARIABLE] = str(spec.weight_group_seconds)
    if Path(spec.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


async def is_up(http: Http, url: str) -> bool:
    """True once the server answers. Everything loaded so far is exempt from garbage collection then, as after the
    warm-up that we skip: every flush of the cache collects garbage, which with all of torch in the heap is most of a
    publication's pause.
    """
    try:
        async with http.session.get(f"{url}/model_info", headers=http.as_client) as response:
            answers = response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
    if answers:
        with suppress(aiohttp.ClientError, TimeoutError):  # only speed is lost
            async with http.session.post(f"{url}/freeze_gc", headers=http.as_admin):
                pass
    return answers
