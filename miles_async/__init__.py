"""Fully asynchronous RL post-training: Megatron-core trains, SGLang generates, neither waits for the other.

The folders are the flow: prompts → rollout → staleness → train_data → trainer → weights → engines.
``wiring/driver.py`` wires them, ``controller.py`` runs them; docs/architecture.md tells the whole story.
"""

__version__ = "0.1.0"
