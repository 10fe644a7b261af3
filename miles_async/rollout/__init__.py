"""The rollout side: ``dispatcher`` (attempts → groups), ``generate`` (prompt → sample), ``batches`` (→ train data)."""
