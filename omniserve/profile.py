"""``python -m omniserve.profile``."""

import sys

from omniserve.launch.profile_cli import main

if __name__ == "__main__":
    sys.exit(main())
