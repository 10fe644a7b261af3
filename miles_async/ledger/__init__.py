"""The ledger and the schedule on disk: every attempt's life and every decision of the pool, written and read."""
