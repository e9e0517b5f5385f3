"""``python -m omniserve.server``."""

# The engine process imports this module too, under another name: nothing heavy belongs up here.
if __name__ == "__main__":
    import sys

    from omniserve.server.cli import parse_args
    from omniserve.server.serve import run

    sys.exit(run(*parse_args()))
