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
    engine_start_timeout: float = flag(600.0, "seconds an engine may take to come up", metavar="SECONDS", above=0)
    engine_max_restarts: int = flag(
        3,
        "restarts allowed within --engine-restart-window, per engine before it is given up; failed first "
        "starts count, too",
        at_least=0,
    )
    engine_restart_window: float = flag(
        3600.0,
        "seconds for which a restart counts against --engine-max-restarts",
        metavar="SECONDS",
        needs=("engine_max_restarts",),
        above=0,
    )
    request_timeout: float = flag(600.0, "seconds one generation request may take", metavar="SECONDS", above=0)
    request_retries: int = flag(
        5, "tries on another engine after a transient error, with exponential backoff", at_least=0
    )
    sglang_router_policy: str = flag("consistent_hashing", "how smg distributes requests over engines")
    sglang_router_port: int | None = flag(
        None,
        "port of the router, which then listens at this node's address (default: a free one, on loopback)",
        at_least=1,
        at_most=65_535,
    )
    sglang_extra: tuple[str, ...] = ()  # collected from --sglang-*, as SGLang's own arguments
    router_extra: tuple[str, ...] = ()  # collected from --router-*, as smg's own arguments
