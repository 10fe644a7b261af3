"""Processes of a run: children, fork servers, the driver and its restarts."""
