"""Advantages of samples relative to their group (``--advantage-estimator``). Pure numpy."""
