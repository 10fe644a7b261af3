"""The trainer's processes: ``group`` (all ranks, from outside), ``actor`` (one rank), ``losses`` (what is minimised).

``placement`` says where ranks run.
"""
