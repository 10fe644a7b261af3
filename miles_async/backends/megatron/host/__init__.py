"""Layers, limits and stand-ins for machines without CUDA or without Transformer Engine."""
