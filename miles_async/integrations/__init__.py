"""Environments and tools of other packages (docs/environments.md): a file is imported by runs with its flag alone."""
