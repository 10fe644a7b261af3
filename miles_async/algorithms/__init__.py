"""Algorithms: advantages, losses, corrections, KL estimators and aggregations.

One small file each, and one row in ``registry``; their protocols are in ``miles_async/api/``. ``advantages`` runs on
the rollout side and is numpy; the rest runs on the trainer and is torch. ``objective`` puts a run's choice together.
"""
