"""The rollout side: ``dispatcher`` (attempts → groups), ``generate`` (prompt → sample), ``manager`` (→ train data)."""
