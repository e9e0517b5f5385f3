"""``python -m omniserve.simulate``."""

import sys

from omniserve.simulate.cli import main

if __name__ == "__main__":
    sys.exit(main())
