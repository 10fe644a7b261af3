"""The trainer's processes: ``ranks`` (all of them, from outside), ``actor`` (one rank) and their ``placement``."""
