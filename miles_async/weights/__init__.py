"""Publication of weights: ``publisher`` runs it; ``export``, ``transports`` and ``verify`` are its parts."""
