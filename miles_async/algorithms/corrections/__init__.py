"""Weights of tokens in the policy loss that correct for off-policy data; those of a run are multiplied. Pure torch."""
