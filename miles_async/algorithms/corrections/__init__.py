"""Weights of tokens in the policy loss that correct for off-policy data; a run multiplies its choice. Pure torch."""
