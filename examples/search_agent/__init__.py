"""A search agent: several searches over a corpus behind a retrieval server, then an answer."""
