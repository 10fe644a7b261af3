"""From the groups of a cut to what each data-parallel rank trains on. Pure numpy.

``batch`` (flat arrays + offsets) → ``dp_split`` (ranks: ``balance`` shares out
``work``, ``packing`` makes micro-batches); ``metrics`` says what was in it.
"""
