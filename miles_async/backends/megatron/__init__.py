"""Megatron-core as TrainBackend.

Read in this order: ``platform.py`` (what differs between CUDA and the host), ``model/build.py`` (checkpoint → model),
``packing/`` (samples → packed sequences), ``model/scores.py`` (→ log-probs), ``learner.py`` (→ gradients), ``step.py``
(the optimizer steps) and ``backend.py``, which makes them one rank.
"""
