"""The contract of KV managers is narrow, and what a class says of its managers is what they can."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import omniserve.kv
from omniserve.kv import KV_MANAGERS, KVManager
from omniserve.kv.disk_prefixes import DiskPrefixes

MOST_METHODS = 15


def methods(cls: type) -> list[str]:
    """Return the public methods and properties of a class, inherited ones, too."""
    found = ((name, inspect.getattr_static(cls, name)) for name in dir(cls) if not name.startswith("_"))
    return [name for name, each in found if callable(each) or isinstance(each, property | staticmethod | classmethod)]


def test_a_manager_has_ten_methods() -> None:
    assert len(methods(KVManager)) == 10
    for name in KV_MANAGERS.names():
        assert methods(KV_MANAGERS.get(name)) == methods(KVManager), name


def test_no_class_has_more_than_a_few_methods() -> None:
    for module in pkgutil.walk_packages(omniserve.kv.__path__, "omniserve.kv."):
        for cls in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(cls) and cls.__module__ == module.name and not issubclass(cls, str | dict):
                assert len(methods(cls)) <= MOST_METHODS, cls


@pytest.mark.parametrize("name", KV_MANAGERS.names())
def test_managers_can_what_their_class_says(name: str) -> None:
    manager = KV_MANAGERS.get(name)
    can, asked = manager.abilities, dict[str, Any]()
    if can.prefixes:
        asked |= {"prefix_cache": True, "num_protected_blocks": 2}
    if can.prefixes and can.moves:
        asked["host_prefixes"] = True
    if can.disk:
        asked["disk"] = DiskPrefixes(4)
    if can.network:
        asked["cpu_hosts"] = True
    for settings in ({}, asked):
        kv = manager(num_device_blocks=8, num_host_blocks=8, block_size=4, **settings)
        assert (kv.moves is not None, kv.evictions is not None) == (can.moves, can.evictions)
        assert (kv.sharing is not None) == can.sharing
        assert (kv.network is not None) == ("cpu_hosts" in settings)
        assert (kv.prefixes is not None) == ("prefix_cache" in settings)
        if kv.prefixes is not None:
            assert (kv.prefixes.host is not None) == ("host_prefixes" in settings)
            assert (kv.prefixes.disk is not None) == ("disk" in settings)
        ends_copies = [kv.checkpoints, kv.evictions, kv.sharing, kv.prefixes.host if kv.prefixes is not None else None]
        assert kv.moves is not None or not any(ends_copies), "moves end the copies of the others"
        kv.check_integrity()
