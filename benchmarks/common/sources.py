"""The sources that a measurement depends on, and how much of them has changed since.

A record keeps, for each source file that ran, a digest and a number of lines. The digest of a Python module is that of
its code without comments, docstrings and formatting, so that a better comment makes no figure old.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "omniserve"
SUFFIXES = {".py", ".cpp", ".h", ".inl"}
KERNELS = "omniserve/ops/csrc"
"""C++ sources of the extension, which run wherever ``omniserve.ops`` was imported."""

Sources = dict[str, tuple[str, int]]
"""Digest and number of code lines of each file, by its path from the root of the project.

A path that ends in a slash stands for all files of that folder, without those of folders in it.
"""

_started: set[str] = set()


def starts(module: str) -> None:
    """Note that a measurement has started ``python -m MODULE``: what that may import counts as measured, too."""
    _started.add(module)


def measured_sources() -> Sources:
    """Return the project's sources that this process has imported, or that a process it started may import."""
    modules = {name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")}
    for module in _started:
        modules |= reachable_from(module) | reachable_from(f"{module}.__main__")
    return sources_of(_files_of(modules))


def sources_of(paths: Iterable[str], root: Path = ROOT) -> Sources:
    """Return digests and lines of files or folders; what is not there is left out."""
    found = {path: _folder(root / path) if path.endswith("/") else _file(root / path) for path in sorted(set(paths))}
    return {path: source for path, source in found.items() if source is not None}


def digest_of(path: str, text: str) -> tuple[str, int]:
    """Return the digest and the number of lines of a file's code."""
    if path.endswith(".py"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
                node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]
        code = ast.unparse(tree)
    else:
        code = re.sub(r"//[^\n]*", "", text)
    lines = [stripped for line in code.splitlines() if (stripped := " ".join(line.split()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:10], len(lines)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What has changed of the sources of a measurement since."""

    lines: int
    """Lines of code of all files at the time of the measurement."""
    changed: tuple[str, ...]
    """Files that are different now."""
    gone: tuple[str, ...]
    """Files that are no longer there."""
    changed_lines: int
    """Lines of code, at that time, of the files that are different now or gone: an upper bound of what changed."""

    @property
    def share(self) -> float:
        """Changed lines as a share of all; 1 if nothing is known of the sources."""
        return self.changed_lines / self.lines if self.lines else 1.0


def change_since(sources: Mapping[str, tuple[str, int]], parts: Iterable[str], root: Path = ROOT) -> Change:
    """Compare the sources of a measurement with those that are there now.

    Args:
        sources: The record's sources.
        parts: Paths that the figures depend on: files, or folders with all in them.
        root: The project.
    """
    prefixes = tuple(parts)
    counted = {path: source for path, source in sources.items() if path.startswith(prefixes)}
    now = sources_of(counted, root)
    gone = tuple(path for path in counted if path not in now)
    changed = tuple(path for path in counted if path in now and now[path][0] != counted[path][0])
    return Change(
        lines=sum(lines for _, lines in counted.values()), changed=changed, gone=gone,
        changed_lines=sum(counted[path][1] for path in (*changed, *gone)),
    )  # fmt: skip


@cache
def reachable_from(module: str) -> frozenset[str]:
    """Return the project's modules that one imports, directly or not, those inside of functions included."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found or (path := _path_of(name)) is None:
            continue
        found.add(name)
        waiting += [name.rpartition(".")[0], *_imports_of(path, name)]
    return frozenset(found)


def _imports_of(path: Path, name: str) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
            source = ".".join(part for part in (base, node.module or "") if part)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _path_of(module: str) -> Path | None:
    if module.partition(".")[0] != PACKAGE:
        return None
    path = ROOT / module.replace(".", "/")
    return next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()), None)


def _files_of(modules: Iterable[str]) -> set[str]:
    paths = {path for module in modules if (path := _path_of(module)) is not None}
    if any(module.startswith(f"{PACKAGE}.ops") for module in modules):
        paths |= {path for path in (ROOT / KERNELS).rglob("*") if path.suffix in SUFFIXES}
    return {str(path.relative_to(ROOT)) for path in paths}


@cache
def _file(path: Path) -> tuple[str, int] | None:
    return digest_of(path.name, path.read_text()) if path.is_file() else None


def _folder(folder: Path) -> tuple[str, int] | None:
    files = {path.name: _file(path) for path in sorted(folder.glob("*")) if path.suffix in SUFFIXES}
    known = {name: source for name, source in files.items() if source is not None}
    text = "\n".join(f"{name} {digest}" for name, (digest, _) in known.items())
    return (
        (hashlib.sha256(text.encode()).hexdigest()[:10], sum(lines for _, lines in known.values())) if known else None
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
