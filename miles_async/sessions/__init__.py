"""The OpenAI-compatible session server: the process that agents talk to, and its supervision by the rollout process."""
