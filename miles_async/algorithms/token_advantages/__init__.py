"""Advantages of tokens, from those of their samples and what models say (``--token-advantages``). Pure torch."""
