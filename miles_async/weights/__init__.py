"""Publication of weights: ``publisher`` runs it; ``staging``, ``transports``, ``update`` and ``verify`` are its
parts.
"""
