"""The OpenAI-compatible session server and its two ends: the process that agents talk to, and who runs it."""
