"""``python -m omniserve.batch``."""

# The engine process imports this module too, under another name: nothing heavy belongs up here.
if __name__ == "__main__":
    import sys

    from omniserve.server.batches.cli import main

    sys.exit(main())
