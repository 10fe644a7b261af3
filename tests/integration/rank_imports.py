"""All that a rank of the trainer imports on CPU, without what a backend patches in the bridge when it is made.

The processes of tests.integration.rank_processes are forked from one that has imported this. Its objects are frozen,
since megatron collects garbage at each save and load, for half a second if it goes through all that was imported.
"""

from __future__ import annotations

import gc
import warnings

import torch

from miles_async.backends.megatron import host

if not torch.cuda.is_available():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host.install(on_cpu=True)  # what makes megatron.bridge importable
        import megatron.bridge  # noqa: F401

        import miles_async.backends.megatron.checkpoints.checkpoint
        import miles_async.backends.megatron.distributed
        import miles_async.backends.megatron.model.build
        import miles_async.backends.megatron.step  # noqa: F401
        import tests.integration.megatron_scenario
        import tests.integration.plain_reference  # noqa: F401

gc.freeze()
