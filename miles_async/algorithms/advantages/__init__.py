"""Advantages of samples, by comparing those of a group (``--advantage-estimator``). Pure numpy."""
