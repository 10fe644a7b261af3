"""Low-rank adapters: LoRA and DoRA."""
