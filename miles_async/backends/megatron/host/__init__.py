"""What Megatron needs where there is no CUDA and no Transformer Engine."""
