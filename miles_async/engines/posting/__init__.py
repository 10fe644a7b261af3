"""How generation requests are sent: from the rollout process itself (``http_post.py``), or from client processes beside
it (``processes.py``), which take HTTP off its event loop (``--rollout-client-processes``).

Either way is a ``Post``. Whether a request may go out, what its answer means and whether it is tried again is decided
by the client of the rollout process alone (``engines/client.py``).
"""
