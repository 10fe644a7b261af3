"""The smallest run that learns: two digit tasks, a 64-token tokenizer and a warm-started tiny Qwen3."""
