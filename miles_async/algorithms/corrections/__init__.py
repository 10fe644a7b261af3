"""Importance weights that correct the policy loss for off-policy data (``--tis-mode``). Pure torch."""
