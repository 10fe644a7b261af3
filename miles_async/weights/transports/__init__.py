"""How staged weights reach the engines. One file per transport; each implements WeightSender."""
