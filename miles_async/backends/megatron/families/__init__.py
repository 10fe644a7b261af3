"""Families of models: known, refused and fixed ones."""
