"""Families of models: which are known, refused, and mended."""
