"""Publication of weights: ``publisher`` runs it, by ``staging``, ``transports``, ``update`` and ``verify``."""
