"""The timeline of a run, for Perfetto and other viewers of Chrome's trace event format.

Everything comes from files that every run writes (ledger, metrics, logs, samples), so runs record nothing more for it,
and old, killed and copied runs have a timeline, too. ``steps``, ``attempts``, ``requests`` and ``notes`` read one kind
of file each, ``trace`` is the format, ``build`` puts them together.
"""
