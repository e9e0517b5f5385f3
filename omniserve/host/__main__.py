"""``python -m omniserve.host``."""

import sys

from omniserve.host.cli import main

if __name__ == "__main__":
    sys.exit(main())
