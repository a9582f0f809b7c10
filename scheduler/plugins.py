"""Policies from outside this tree, by dotted name: `module:Class` in the settings.

    scheduler.policy    = "module:Class"     a Queue, made without arguments
    scheduler.batching  = "module:Class"     a Batching, made with the batch limits
    scheduler.placement = "module:Class"     a Placement, made with a random generator

The module must be importable by the scheduler's process (PYTHONPATH).
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TypeVar

from lorrery.chassis.errors import SettingsError

T = TypeVar("T")


def find(key: str, name: str, known: Mapping[str, T]) -> T:
    """Return what a name stands for: an entry of the catalogue, or an attribute of a module.

    Args:
        key: the setting, for messages.
        name: a key of `known`, or `module:attribute`.
        known: the catalogue's.

    Raises:
        SettingsError: no such module or attribute.
    """
    if ":" not in name:
        return known[name]
    module_name, _, attribute = name.partition(":")
    try:
        found: T = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{key}: {name}: {error}") from None
    return found
