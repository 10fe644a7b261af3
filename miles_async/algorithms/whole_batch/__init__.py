"""Transforms that see all tokens of a rollout batch, over micro-batches and ranks (``transform.py``). Pure torch."""
