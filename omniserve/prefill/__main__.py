"""``python -m omniserve.prefill``."""

import sys

from omniserve.prefill.cli import main

if __name__ == "__main__":
    sys.exit(main())
