"""Convert the groups of a cut into the shards of data-parallel ranks. Pure numpy.

``batch`` (a table of branches) → ``dp_split`` (ranks: ``balance`` shares out ``work``, ``packing`` makes micro-batches,
``siblings`` keeps samples of one prompt together; then tokens are copied into flat arrays); ``metrics`` says what was
in it.
"""
