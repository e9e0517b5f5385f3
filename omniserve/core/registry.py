"""Registry: a name finds an implementation; ``"package.module:Class"`` works wherever a name does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
C = TypeVar("C")


class Registry(Generic[T]):
    """A registry of replaceable parts of one kind, by name.

    Errors name the kind ("scheduler"). Modules of ``package`` register the built-in entries; it is imported at the
    first look-up.
    """

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, T] = {}
        self._paths: dict[str, str] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Return a decorator that files its argument under ``name`` and hands it back unchanged.

        Raises:
            ValueError: The name is taken.
        """

        def decorate(entry: C) -> C:
            if name in self._entries or name in self._paths:
                owner = self._entries.get(name, self._paths.get(name))
                raise ValueError(f"{self.kind} {name!r} is registered already, by {owner!r}")
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return decorate

    def register_at(self, name: str, path: str) -> None:
        """File the object at ``"package.module:Attribute"`` under ``name``; it is imported when it is asked for.

        Raises:
            ValueError: The name is taken.
        """
        if name in self._entries or name in self._paths:
            owner = self._entries.get(name, self._paths.get(name))
            raise ValueError(f"{self.kind} {name!r} is registered already, by {owner!r}")
        self._paths[name] = path

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        self._load_package()
        return sorted({*self._entries, *self._paths})

    def get(self, name: str) -> T:
        """Return the entry called ``name``, or the object at ``"package.module:Attribute"``.

        Raises:
            ValueError: Nothing has this name, or the path does not lead to an object.
        """
        self._load_package()
        if name in self._entries:
            return self._entries[name]
        path = self._paths.get(name, name)
        if ":" in path:
            module_name, _, attribute = path.partition(":")
            try:
                return getattr(importlib.import_module(module_name), attribute)
            except (ImportError, AttributeError) as error:
                raise ValueError(f"{self.kind} {name!r} cannot be loaded: {error}") from error
        raise ValueError(
            f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}; or give 'package.module:Class'"
        )

    def _load_package(self) -> None:
        if self._package is not None:
            importlib.import_module(self._package)
