"""Rewards: one finished sample and its prompt → a number."""
