"""Machinery that knows nothing of training: processes, addresses, Ray, the run directory, hooks, the clock."""
