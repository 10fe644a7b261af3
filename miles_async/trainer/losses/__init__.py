"""Policy losses: what the trainer minimises, behind the protocol PolicyLoss. Pure torch."""
