"""SGLang servers and the router. ``--sglang-X`` reaches SGLang and ``--router-X`` smg, as ``--X``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.flag import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginesArguments:
    """Engines"""

    server_groups: Path | None = flag(
        None,
        "TOML file of engine groups, for engines that differ: larger ones, ones for evaluation, a frozen model for "
        "rewards; replaces --rollout-num-gpus and --rollout-num-gpus-per-engine",
        metavar="FILE",
    )
    rollout_external: tuple[str, ...] = flag(
        (), "generate with SGLang servers that are running already; they are left running", metavar="HOST:PORT"
    )
    engine_start_timeout: float = flag(600.0, "seconds an engine may take to come up", metavar="SECONDS")
    engine_max_restarts: int = flag(
        3,
        "restarts allowed within --engine-restart-window, per engine before it is given up and per client process "
        "before the run ends; failed first starts of engines count, too",
    )
    engine_restart_window: float = flag(
        3600.0, "seconds for which a restart counts against --engine-max-restarts", metavar="SECONDS"
    )
    request_timeout: float = flag(600.0, "seconds one generation request may take", metavar="SECONDS")
    request_retries: int = flag(5, "tries on another engine after a transient error, with exponential backoff")
    rollout_client_processes: int = flag(
        0,
        "processes that send generation requests to the training engines; 0: the rollout process sends them, which "
        "suffices up to about 700 requests per second (each turn of an agent is one). Use 1 beyond that, or if "
        "`miles-async plan` says so: it relieves the rollout process of a third of its work",
    )
    sglang_router_policy: str = flag("consistent_hashing", "how smg distributes requests over engines")
    sglang_router_port: int | None = flag(
        None, "port of the router, which then listens at this node's address (default: a free one, on loopback)"
    )
    sglang_extra: tuple[str, ...] = ()  # collected from --sglang-*, as SGLang's own arguments
    router_extra: tuple[str, ...] = ()  # collected from --router-*, as smg's own arguments
