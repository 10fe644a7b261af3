"""Checks of a machine: what would stop or slow a run on it.

Each check is a function that yields findings; ``checks.py`` lists them. ``miles-async doctor`` shows all findings, and
a run makes the same checks before it starts anything. Nothing here knows a run's flags.
"""
