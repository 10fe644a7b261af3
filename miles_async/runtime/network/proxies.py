"""Keep the environment's HTTP proxies (http_proxy and its kin) out of traffic between processes of a run.

aiohttp ignores proxies without ``trust_env``, which nothing here sets. smg, SGLang, and the clients of agents and hooks
read them from the environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")  # in capitals, too
_EXCEPTIONS = ("NO_PROXY", "no_proxy")  # some clients read one, some the other


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy of ``environment`` without proxies, for a process that contacts nothing outside of the run.

    The variables are left out: smg's HTTP client does not apply ``NO_PROXY=*`` to addresses that are numbers.
    """
    return {name: value for name, value in environment.items() if name.lower() not in _PROXIES}


def without_proxies_for(hosts: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to ``environment`` so that this node and ``hosts`` are reached without its proxies."""
    known = [name.strip() for variable in _EXCEPTIONS for name in environment.get(variable, "").split(",")]
    exceptions = dict.fromkeys([*filter(None, known), "localhost", "127.0.0.1", *hosts])
    return dict.fromkeys(_EXCEPTIONS, ",".join(exceptions))
