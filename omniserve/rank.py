"""``python -m omniserve.rank``."""

import sys

from omniserve.parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
