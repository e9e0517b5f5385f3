"""``python -m omniserve.perplexity``: what quantising a model costs, in perplexity and bytes."""

import sys

from omniserve.launch.perplexity_cli import main

if __name__ == "__main__":
    sys.exit(main())
