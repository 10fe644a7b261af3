"""Algorithms: advantages, losses, corrections, KL estimators and aggregations.

Each is a row of ``registry`` and implements a protocol of ``miles_async/api/``. ``advantages`` runs on the rollout side
(numpy), the rest on the trainer (torch). ``objective`` assembles the parts that a run has chosen.
"""
