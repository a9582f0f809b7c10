"""Tables of options: a dataclass whose fields say all that a command line and a Python function need to offer them.

Each option stands in one place: name, type and default are the field's; help, bounds and names on the command line are
in the `Option` of its annotation. `service.commands` makes a command's parameters from such a table, and `arguments_of`
the arguments of a function. A field whose annotation has a text in place of an `Option` is for Python only.

    workers: Annotated[int | None, Option("Number of worker processes.", least=1)] = None
    on_end: Annotated[Callable[[Request], None] | None, "Called with each request as it ends."] = None
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, cleandoc
from textwrap import fill
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

__all__ = ["Option", "arguments_of", "flag_of", "given_to", "method_arguments_of", "options_of", "part_of"]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")

_DOC_WIDTH = 108


@dataclass(frozen=True, slots=True)
class Option:
    """What an option is, beside its field's name, type and default.

    Attributes:
        help: one or more sentences.
        in_python: replaces `help` for callers from Python; empty: `help` suits them.
        panel: of the help; None: the first one.
        metavar: of the value in the help; None: it is a switch, or its type is said.
        names: on the command line; empty: the field's.
        parse: reads text where the type is no text or number; each of the texts of a repeatable option.
        read: in place of its type's checks: takes the field's name and a value from Python, and returns it converted.
        derived: unset on the command line, its value comes from other options instead of its default.
        repeatable: the command line may have it several times; the field is a tuple.
        least: lowest value.
        above: in place of `least`: the value must be above it.
        most: highest value.
        least_typed: lowest value on the command line; None: `least`.
        most_typed: highest value on the command line.
    """

    help: str
    panel: str | None = None
    metavar: str | None = None
    names: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    read: Callable[[str, Any], Any] | None = None
    derived: bool = False
    repeatable: bool = False
    least: float | None = None
    above: float | None = None
    most: float = math.inf
    least_typed: float | None = None
    most_typed: float | None = None
    in_python: str = ""


def options_of(table: type[Any]) -> Mapping[str, Option]:
    """Return a table's options by field, in order, without the fields for Python only."""
    return {name: one for name, one in _texts_of(table).items() if isinstance(one, Option)}


def _texts_of(table: type[Any]) -> dict[str, Option | str]:
    hints = get_type_hints(table, include_extras=True)
    return {
        name: one
        for name, hint in hints.items()
        for one in getattr(hint, "__metadata__", ())
        if isinstance(one, Option | str)
    }


def flag_of(name: str, option: Option) -> str:
    """Return an option's first name on the command line."""
    return next(iter(option.names), f"--{name.replace('_', '-')}")


def given_to(table: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a table's options on a command line, parsed; without those that are unset.

    Args:
        table: of the options.
        given: values by field, as text where the option has a parser; other entries are ignored.

    Raises:
        SettingsError: from a parser.
    """
    found: dict[str, Any] = {}
    for name, option in options_of(table).items():
        value = given.get(name)
        if value is None:
            continue
        if option.repeatable:
            value = tuple(value if option.parse is None else map(option.parse, value))
        elif option.parse is not None and isinstance(value, str):
            value = option.parse(value)
        found[name] = value
    return found


def part_of(table: type[T], values: object) -> T:
    """Return a table with the values that an object, such as one of a derived table, has for its fields."""
    return table(**{one.name: getattr(values, one.name) for one in fields(table)})  # type: ignore[arg-type]


def arguments_of(table: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Return a decorator that gives a function of one table the table's fields as its arguments.

    Type checkers and editors see the names, types and defaults of the fields; `help` shows their texts too.
    """

    def give(function: Callable[[T], R]) -> Callable[P, R]:
        @wraps(function)
        def call(*arguments: P.args, **given: P.kwargs) -> R:
            _check_names(function, table, arguments, given)
            return function(table(*arguments, **given))

        _describe(call, table)
        return call

    return give


def method_arguments_of(table: Callable[P, T]) -> Callable[[Callable[[S, T], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator as that of `arguments_of` for a method."""

    def give(method: Callable[[S, T], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def call(self: S, /, *arguments: P.args, **given: P.kwargs) -> R:
            _check_names(method, table, arguments, given)
            return method(self, table(*arguments, **given))

        _describe(call, table, Parameter("self", Parameter.POSITIONAL_ONLY))
        return call

    return give


def _check_names(
    function: Callable[..., Any], table: Callable[..., Any], arguments: tuple[Any, ...], given: Mapping[str, Any]
) -> None:
    """Check arguments in the function's name, not the table's.

    Raises:
        TypeError: one that it does not have.
    """
    try:
        Signature.from_callable(table).bind(*arguments, **given)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}() {error}") from None


def _describe(call: Callable[..., Any], table: Callable[..., Any], *before: Parameter) -> None:
    """Set signature and docstring of a function whose arguments are a table's fields."""
    signature = Signature.from_callable(table)
    kinds = get_type_hints(table)
    parameters = [*before, *(one.replace(annotation=kinds[name]) for name, one in signature.parameters.items())]
    returned = Signature.from_callable(call).return_annotation
    setattr(call, "__signature__", Signature(parameters, return_annotation=returned))  # noqa: B010  of any callable
    assert isinstance(table, type)
    texts = _texts_of(table)
    lines = ["Args:"]
    for name in signature.parameters:
        one = texts.get(name, "")
        text = (one.in_python or one.help).replace("\\[", "[") if isinstance(one, Option) else one
        lines.append(fill(f"{name}: {text}", _DOC_WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8))
    head, raises, rest = cleandoc(call.__doc__ or "").partition("Raises:")
    call.__doc__ = "\n\n".join(filter(None, (head.rstrip(), "\n".join(lines), f"{raises}{rest}")))
