"""``python -m omniserve.server``."""

# The engine process imports this module too, under another name: nothing heavy belongs up here.
if __name__ == "__main__":
    import sys

    from omniserve.server.process_settings import start_fork_server

    start_fork_server()  # first, because what it imports takes longer than all that is imported here

    from omniserve.core.logs import hold_logs

    hold_logs()  # until the settings say how they are written

    from omniserve.server.cli import parse_args
    from omniserve.server.serve import run

    sys.exit(run(*parse_args()))
