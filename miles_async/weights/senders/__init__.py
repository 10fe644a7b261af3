"""The sending rank's half of each transport: a Staging, and what its files leave by. Each implements WeightSender."""
