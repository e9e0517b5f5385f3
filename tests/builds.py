"""Native code that tests compile, kept on disk by a digest of its sources and of the command."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tests.cache import FOLDER, digest_of, locked, put


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def built(name: str, command: Sequence[str | Path], sources: Iterable[Path], text: str | None = None) -> Path:
    """Return the file that a compiler makes, which is not called if it has made it before.

    Args:
        name: Of the file, with a suffix.
        command: The compiler and all of its options but ``-o``.
        sources: The files that it reads: sources, headers, and objects to link.
        text: The source that the compiler reads from its standard input.
    """
    words = [str(word) for word in command]
    contents = [(source.name, digest_of(source.read_bytes())) for source in sorted(sources)]
    digest = digest_of(_version(words[0]), words, contents, text)
    path = FOLDER / "builds" / f"{Path(name).stem}-{digest}{Path(name).suffix}"

    def compile_to(output: Path) -> None:
        done = subprocess.run([*words, "-o", str(output)], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    with locked(path):
        return path if path.exists() else put(path, compile_to)
