"""Evaluation on held-out prompts, between publications."""
