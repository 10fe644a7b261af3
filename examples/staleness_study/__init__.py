"""What staleness does to learning, measured with the real stack: `make study`."""
