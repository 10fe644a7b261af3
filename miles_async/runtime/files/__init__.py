"""Directories of a run, and of its temporary files."""
