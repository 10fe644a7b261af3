"""The page of a run: what its files say, for people, in a browser (docs/watching.md).

``run`` opens a run directory, ``metrics_table`` and ``views/`` read it, ``server`` answers the page in ``static/``,
``report`` writes the same page into one file. It only reads, and imports neither torch nor Ray.
"""
