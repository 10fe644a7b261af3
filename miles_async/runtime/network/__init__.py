"""Addresses, ports, doors and their keys."""
