"""Small environments of other packages, as docs/environments.md describes; tests play or train each."""
