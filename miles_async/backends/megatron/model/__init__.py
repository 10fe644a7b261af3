"""The model of a rank, and its outputs per token."""
