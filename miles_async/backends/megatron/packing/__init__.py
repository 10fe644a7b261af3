"""Packed sequences: samples in, positions in the model out."""
