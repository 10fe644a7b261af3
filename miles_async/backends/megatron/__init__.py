"""Megatron-core as TrainBackend.

Read in this order: ``platform`` (what differs between CUDA and the host), ``model`` (checkpoint → model),
``packing``, ``scores`` and ``vocab_logprobs`` (samples → log-probs), ``step`` (the optimizer steps), ``backend`` (all
of it together).
"""
