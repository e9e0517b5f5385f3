"""``python -m omniserve.cluster``."""

import sys

from omniserve.cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
