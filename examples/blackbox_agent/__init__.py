"""An agent that only knows the openai client, trained through the session server."""
