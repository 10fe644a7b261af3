"""Checkpoints of a rank: Megatron's, exact, and Hugging Face's weights."""
