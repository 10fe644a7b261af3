"""Settings of all tests: Hypothesis, threads, signals, garbage collection."""

from __future__ import annotations

import gc
import os
import signal

from hypothesis import HealthCheck, settings

# A loaded machine is slow, which is no failure.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("project")

# Before torch is imported: there are more workers than cores, and threads that wait for one another burn them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what runs in the background (`make test &`) deaf to Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # nearly all that collecting tests imports stays, and looking through it takes seconds


def pytest_collection_finish() -> None:
    """Tests begin: look for garbage again, but not among what was there before them."""
    gc.freeze()
    gc.enable()
