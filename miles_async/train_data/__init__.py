"""From the groups of a cut to what each data-parallel rank trains on. Pure numpy.

``advantages`` (compare within groups) → ``batch`` (flat arrays + offsets) → ``packing`` (micro-batches) →
``dp_split`` (ranks); ``metrics`` says what was in it.
"""
