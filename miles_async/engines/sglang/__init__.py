"""SGLang: how its servers are started, what is patched in them, and their HTTP API."""
