"""``python -m omniserve.host``."""

import sys

from omniserve.remote.host_cli import main

if __name__ == "__main__":
    sys.exit(main())
