"""Policy losses (``--policy-loss``), per token. Pure torch."""
