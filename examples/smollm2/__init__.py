"""A real language model learns sums on a laptop: SmolLM2-135M-Instruct."""
