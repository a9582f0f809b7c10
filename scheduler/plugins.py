"""Policies from outside this tree, by dotted name: `module:Class` in the settings.

    scheduler.policy    = "module:Class"     a Queue, made of policy_options
    scheduler.batching  = "module:Class"     a Batching, made of the batch limits and batching_options
    scheduler.placement = "module:Class"     a Placement, made of a random generator and placement_options

Options are keyword arguments. The module is searched on Python's path (PYTHONPATH) and then in the working directory,
by every process that needs it: services, simulations and commands alike. A class that does not fit its role is refused
before anything runs.
"""

import inspect
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from lorrery.scheduler.core.checked.base import error_text
from lorrery.service.errors import SettingsError

T = TypeVar("T")

_RAISED = (Exception, SystemExit, GeneratorExit)
"""What a plug-in's author may have raised; Ctrl-C is left to the caller."""

_SPECIAL = ("__len__", "__iter__")
"""Special methods that a protocol may require."""


@dataclass(frozen=True)
class PlugIn(Generic[T]):
    """A class from outside the tree, and the options that it is made with.

    Attributes:
        key: the setting that names it, for messages.
        name: `module:Class`.
        options: keyword arguments of the class.
        protocol: that its instances must satisfy.
    """

    key: str
    name: str
    made_by: type
    options: Mapping[str, Any]
    protocol: type

    def make(self, *arguments: object, asks: Iterable[str] = ()) -> T:
        """Make an instance.

        Args:
            arguments: positional ones that come before the options.
            asks: attributes that it may have beside the protocol's, which are read later.

        Raises:
            SettingsError: an option that the class does not take or that it lacks, an exception in it, or a method
                that is missing or takes other arguments; names the class and what is wrong.
        """
        self._check_options(len(arguments))
        try:
            made: T = self.made_by(*arguments, **self.options)
        except _RAISED as error:
            raise self._refused(f"making it raised {in_words(error)}") from error
        for name, asked in _members(self.protocol).items():
            if not self._has(made, name):
                raise self._refused(f"it has no attribute {name}, which a {self.protocol.__name__} has")
            if not _is_attribute(asked) and (wrong := _other_arguments(getattr(made, name), asked)) is not None:
                raise self._refused(f"{name}{wrong}")
        for name in asks:
            self._has(made, name)
        return made

    def _has(self, made: object, name: str) -> bool:
        """Return whether an instance has an attribute; one that raises is refused."""
        try:
            return hasattr(made, name)
        except _RAISED as error:
            raise self._refused(f"its {name} raised {in_words(error)}") from error

    def _check_options(self, num_arguments: int) -> None:
        try:
            parameters = list(inspect.signature(self.made_by).parameters.values())
        except ValueError:  # compiled, without a signature
            return
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        own = [one for one in parameters[num_arguments:] if one.kind in named]
        names = [one.name for one in own]
        for name in self.options:
            if name not in names and not takes_any:
                takes = f"takes {', '.join(names)}" if names else "takes none"
                raise SettingsError(f"{self.key}_options.{name}: no such option; {self.made_by.__name__} {takes}")
        for one in own:
            if one.default is one.empty and one.name not in self.options:
                raise SettingsError(f"{self.key}_options.{one.name}: {self.made_by.__name__} needs this option")

    def _refused(self, why: str) -> SettingsError:
        return SettingsError(f"{self.key}: {self.name}: {why}")


def find(key: str, name: str, protocol: type, options: Mapping[str, Any]) -> PlugIn[Any]:
    """Return the class that a dotted name stands for.

    Args:
        key: the setting, for messages.
        name: `module:Class`.
        protocol: that its instances must satisfy.
        options: keyword arguments of the class.

    Raises:
        SettingsError: no such module, an error in it, or its attribute of that name is no such class.
    """
    search_here()
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{key}: {name}: {error}") from None
    except _RAISED as error:  # the author's own, at the top of the module
        raise SettingsError(f"{key}: {name}: importing {module_name} raised {in_words(error)}") from error
    if not isinstance(found, type):
        raise SettingsError(f"{key}: {name}: it is not a class, but a {type(found).__name__}")
    missing = [name for name, asked in _members(protocol).items() if not (_is_attribute(asked) or hasattr(found, name))]
    if missing:
        raise SettingsError(f"{key}: {name}: it is no {protocol.__name__}, which has {', '.join(missing)}")
    return PlugIn(key, name, found, options, protocol)


def search_here() -> None:
    """Make modules in the working directory importable too, after everything else on the path."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def in_words(error: BaseException) -> str:
    """Return an exception with the place in its author's file: `KeyError: 3 (my_module.py, line 12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{error_text(error)}{where}"


def _members(protocol: type) -> dict[str, Any]:
    """Return the members that a protocol requires, by name: its methods, and its attributes (as properties).

    Special methods come first, in the order of `_SPECIAL`; a compiled class has them in another order.
    """
    members = vars(protocol)
    names = [*filter(members.__contains__, _SPECIAL), *(name for name in members if not name.startswith("_"))]
    return {name: members[name] for name in names if _is_attribute(members[name]) or callable(members[name])}


def _is_attribute(member: object) -> bool:
    return isinstance(member, property) or inspect.isgetsetdescriptor(member)  # the latter in a compiled protocol


def _other_arguments(method: object, asked: Any) -> str | None:  # noqa: ANN401  a function, compiled or not
    """Return how a bound method's arguments differ from what it is called with, or None if it can be called so."""
    if not callable(method):
        return " is no method"
    try:
        arguments = list(inspect.signature(asked).parameters)[1:]
        signature = inspect.signature(method)
    except ValueError:  # compiled, and silent about what it takes
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return f"{signature} is called as ({', '.join(arguments)})"
    return None
