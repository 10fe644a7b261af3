"""One file per command of ``miles-async``; ``cli.py`` calls them."""
