"""``python -m miles_async``: the same as ``miles-async``."""

import sys

from miles_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
