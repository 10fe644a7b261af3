"""Hypothesis settings for all tests: a loaded machine is slow, which is no failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("project")
