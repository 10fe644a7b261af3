"""Advantages of tokens, from their samples' advantages and outputs of models (``--token-advantages``). Pure torch."""
