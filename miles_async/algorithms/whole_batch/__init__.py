"""Changes of advantages that look at all tokens of a rollout batch, over micro-batches and ranks. Pure torch.

They run once, after ``--token-advantages`` and before the first optimizer step on the batch.
"""
