"""``python -m omniserve.bench``, also ``omniserve bench``."""

import sys

from omniserve.bench.cli import main

sys.exit(main())
