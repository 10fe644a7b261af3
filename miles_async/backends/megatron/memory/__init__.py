"""Measure the memory that a rank will need, without allocating it."""
