"""Run unmodified megatron-core 0.16 and megatron-bridge 0.3 on a machine without CUDA.

:func:`install` is a no-op where ``torch.cuda.is_available()``; nothing here changes numerics. One topic per file:

- ``device_views``     megatron modules see a ``torch`` in which the device "cuda" is the host
- ``rng``              the model-parallel RNG tracker forks the CPU generator
- ``optimizer_types``  optimizers ask ``param.type() == "torch.cuda.FloatTensor"``
- ``host_tensors``     code that takes "on the host" for "already converted", and ``torch.compile`` of tiny helpers
- ``uneven_gather``    gloo wants the same length from every rank
- ``absent_modules``   transformer_engine and triton are imported unconditionally in a few places; the only topic that
                       :func:`install_stand_ins` brings to a GPU machine without them
- ``import_hook``      applies the above to each megatron module once its body has run

``tests/integration/test_megatron_compat.py`` fails when upstream no longer needs one of them. Bugs of
megatron-bridge that matter on every platform are in ``bridge_fixes``, not here.
"""

from __future__ import annotations

import torch

_installed = False


def install() -> bool:
    """Install the patches, before the first import of megatron. True if megatron now runs on the host."""
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    _installed = True

    from miles_async.backends.megatron.host.cpu_compat import (
        absent_modules,
        device_views,
        host_tensors,
        import_hook,
        optimizer_types,
        rng,
        uneven_gather,
    )

    import_hook.install(
        view=device_views.torch_view(),
        patches={
            **absent_modules.patches(),
            **rng.PATCHES,
            **optimizer_types.PATCHES,
            **host_tensors.PATCHES,
            **uneven_gather.PATCHES,
        },
        stand_ins=absent_modules.stand_ins(),
    )
    device_views.patch_cuda_methods()
    _let_core_decide()
    return True


def install_stand_ins() -> None:
    """Make megatron importable on a GPU machine without Transformer Engine or triton; before its first import.

    Nothing else is changed there.
    """
    global _installed
    if _installed:
        return
    _installed = True

    from miles_async.backends.megatron.host.cpu_compat import absent_modules, import_hook

    import_hook.install(view=torch, patches=absent_modules.patches(), stand_ins=absent_modules.stand_ins())
    _let_core_decide()


def _let_core_decide() -> None:
    """The stand-ins must never make megatron believe that Transformer Engine is there: core decides first."""
    import megatron.core
    import megatron.core.extensions.transformer_engine
    import megatron.core.transformer.moe.moe_utils  # noqa: F401
