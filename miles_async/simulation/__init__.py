"""The real loop under virtual time: engine servers, router process and trainer ranks are simulated, nothing else is.

A second composition root next to ``wiring/driver.py``. Used by tests/simulation, ``miles-async plan`` and
tests/benchmarks/simulated_scale.py; docs/simulation.md lists the real parts.
"""
