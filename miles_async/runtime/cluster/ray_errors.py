"""One-line reasons from Ray's errors about dead processes."""

from __future__ import annotations

# Ray explains at length; what comes before these names the process and how it ended, or how full the memory was.
_EXPLANATIONS = ("Some common causes", "Ray killed this worker", "Refer to the documentation")


def why_gone(error: Exception) -> str:
    """Say how the called process ended. ``error`` is Ray's own, not one that the call raised."""
    from ray.exceptions import OutOfMemoryError  # here, since tools and tests use engines without Ray

    text = str(error)
    for explanation in _EXPLANATIONS:
        text = text.split(explanation)[0]
    found = " ".join(text.split())
    if isinstance(error, OutOfMemoryError):
        return (
            f"Ray killed it since the machine ran out of memory (fewer --rollout-num-gpus or --actor-num-gpus-per-node "
            f"on it, or a machine with more): {found}"
        )
    return found
