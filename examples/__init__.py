"""Worked examples; one folder each, with its own README."""
