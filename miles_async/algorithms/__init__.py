"""Advantages and losses: what a batch teaches."""
