"""The model of a rank, and what it computes of each token."""
