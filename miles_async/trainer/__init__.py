"""The trainer's processes: ``group`` (all ranks, from outside), ``actor`` (one rank) and their ``placement``."""
