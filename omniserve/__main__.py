"""The command ``omniserve``, also ``python -m omniserve``: its subcommands are the programs of this package."""

# The engine process may import this module, too, under another name: nothing heavy belongs up here.
import runpy
import sys

PROGRAMS = {
    "serve": ("server", "serve a model behind OpenAI's API"),
    "engine": ("server.engines", "be an engine of a server on another machine"),
    "engines": ("server.engines.admin_cli", "see and change the engines of a running server"),
    "bench": ("bench", "load a server, and tell how long answers take"),
    "batch": ("batch", "run a file of requests, with a server or without one"),
    "profile": ("profile", "measure how long the steps of a model take"),
    "perplexity": ("perplexity", "tell what quantising a model costs, on a text"),
    "simulate": ("simulate", "serve a load on a machine that is made up"),
    "explain": ("explain", "say what made a request slow"),
    "host": ("host", "lend this machine's memory and CPU to a server"),
    "prefill": ("prefill", "compute prompts for a server"),
    "rank": ("rank", "be one of the processes that serve a model together"),
    "cluster": ("cluster", "start the parts of a server on the machines of a Ray cluster"),
}
"""The modules of the subcommands, and what they do."""


def _usage() -> str:
    lines = [f"  {name:<11} {text}" for name, (_, text) in PROGRAMS.items()]
    return "\n".join(["usage: omniserve COMMAND ...", "", *lines, "", "omniserve COMMAND --help lists its flags."])


def main() -> int:
    """Run the subcommand that the command line names, and return the exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        from omniserve.core.version import __version__

        print(f"omniserve {__version__}")
        return 0
    from omniserve.core import arguments

    if name not in PROGRAMS:
        meant = arguments.nearest(name, dict(zip(PROGRAMS, PROGRAMS, strict=True)))
        print(f"omniserve: error: there is no command {name!r}{meant} (--help lists them)", file=sys.stderr)
        return 2
    arguments.command = f"omniserve {name}"
    del sys.argv[1]
    runpy.run_module(f"omniserve.{PROGRAMS[name][0]}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
