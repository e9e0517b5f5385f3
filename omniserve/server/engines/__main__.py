"""``python -m omniserve.server.engines``, also ``omniserve engine``."""

# The engine's process imports this module too, under another name: nothing heavy belongs up here.
if __name__ == "__main__":
    import sys

    from omniserve.server.process_settings import start_fork_server

    start_fork_server()

    from omniserve.server.engines.cli import main

    sys.exit(main())
