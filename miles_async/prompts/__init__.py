"""Prompts: rows of a file → tokenized :class:`~miles_async.types.Prompt` records, with a cursor."""
