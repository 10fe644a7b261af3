"""Observability: metrics, progress, logs, summary, plots. Never blocks or ends training."""
