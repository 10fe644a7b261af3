"""What the outside sees of a run: metrics, progress, logs, summary, plots. Never blocks or ends training."""
