"""A tiny model that can use tools, sometimes: what the multi-turn examples start from."""
