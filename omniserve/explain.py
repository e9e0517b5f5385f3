"""``python -m omniserve.explain``."""

import sys

from omniserve.latency.explain import main

if __name__ == "__main__":
    sys.exit(main())
