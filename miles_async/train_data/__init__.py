"""Convert the groups of a cut into the shards of data-parallel ranks. Pure numpy.

``batch_maker`` does it: a table of branches and flat arrays of tokens (``batch``), shared out by their ``work`` and
packed (``balance``), samples of one prompt together if they share it (``siblings``); ``metrics`` describes it.
"""
