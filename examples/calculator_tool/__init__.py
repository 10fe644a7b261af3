"""A model learns to use a calculator: multi-turn generation with an environment."""
