"""The trainer: ``ranks`` (all of them as one), ``rank_actors`` (calls on them), ``actor`` (one rank), ``placement``."""
