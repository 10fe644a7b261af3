"""Variables of the driver's environment that reach processes on other nodes, and how.

``--forward-env`` selects variables by name (its default and the reasons are in ``arguments/cluster.py``). Plain ones
travel as Ray's runtime environment. Ray writes that into its logs, so secrets travel as arguments of actors instead and
are put into the environment of the process that needs them.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from miles_async.runtime.cuda_environment import cuda_environment
from miles_async.runtime.network.keys import KEY_VARIABLES, Secret
from miles_async.runtime.processes.run_process import MARK

_SECRET_NAMES = ("*TOKEN*", "*KEY", "*KEY_ID", "*KEYS", "*SECRET*", "*PASSWORD*", "*PASSWD*", "*CREDENTIAL*", "AWS_*")
_NEVER = (*KEY_VARIABLES, "CUDA_VISIBLE_DEVICES")  # the run hands over its keys itself, and Ray each actor its GPUs
_HIDEABLE = sys.stdlib_module_names - {*sys.builtin_module_names, "test"}  # nothing that runs imports Python's tests

SecretEnvironment = Mapping[str, Secret]
"""Variables whose values are never shown."""


def worker_environment(patterns: Sequence[str], *, cpu: bool) -> dict[str, str]:
    """Environment of Ray workers: our variables that match ``patterns`` (A8), without secrets, and device settings."""
    forwarded = {name: text for name, text in _selected((*patterns, MARK)) if not is_secret(name, text)}
    environment = {
        **forwarded,
        "PYTHONPATH": os.pathsep.join(_module_path()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cpu:  # one thread per process: there are more processes than cores already
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    else:
        environment |= cuda_environment(forwarded)
    return environment


def hidden_modules() -> Iterator[str]:
    """Yield the files of the module path that Ray workers would import in the place of Python's own modules."""
    for directory in _module_path():
        with suppress(OSError), os.scandir(directory) as entries:  # Python skips what is no readable directory, too
            for entry in sorted(entries, key=lambda entry: entry.name):
                package = os.path.join(entry.path, "__init__.py")
                path = entry.path if entry.name.endswith(".py") else package
                name = entry.name.removesuffix(".py")
                if name in _HIDEABLE and os.path.isfile(path):
                    yield f"{path}: every process of the run would import it in the place of Python's {name}; rename it"


def secret_environment(patterns: Sequence[str]) -> dict[str, Secret]:
    """The secrets among the variables that ``patterns`` select, for actors that put them into their environment."""
    return {name: Secret(text) for name, text in _selected(patterns) if is_secret(name, text)}


def apply_secrets(secrets: SecretEnvironment) -> None:
    os.environ.update({name: secret.reveal() for name, secret in secrets.items()})


def is_secret(name: str, text: str) -> bool:
    """True for names that secrets have, and for proxies and addresses with a password in them.

    >>> is_secret("HF_TOKEN", "hf_x"), is_secret("https_proxy", "http://me:pass@proxy:3128"), is_secret("HF_HOME", "/x")
    (True, True, False)
    """
    named_so = any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in _SECRET_NAMES)
    return named_so or ("://" in text and "@" in text)


def _module_path() -> list[str]:
    """Modules named by --custom-*-path are looked up as they are for the driver: from the working directory on."""
    return list(dict.fromkeys([os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))


def _selected(patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name, text in os.environ.items():
        if name not in _NEVER and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            yield name, text
