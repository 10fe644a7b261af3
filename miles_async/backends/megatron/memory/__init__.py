"""What a rank needs, without allocating it."""
