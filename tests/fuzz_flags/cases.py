"""The corpus: which command line a case runs. Every option of every subcommand is found in the commands themselves."""

import random
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import pydantic
import typer
from typer._click.core import Parameter
from typer.core import TyperOption

from lorrery.cli.app import PARTS, part_named
from lorrery.service.settings.cluster import Settings

FILES = {
    "folder": None,
    "empty": "",
    "brackets.toml": "a = " + "[" * 20_000,
    "brackets.json": "[" * 20_000,
    "line.jsonl": '{"timestamp": 1e999, "input_length": -1}\n',
    "words.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,nan,-1\n",
}
"""In the folder that a case runs in: name and content; None: a folder."""

NUMBERS = (
    *("-1", "0", "1", "2", "-0.0", "0.5", "1e-320", "1e308", "-1e308", "nan", "inf", "-inf", "1e400"),
    *(str(2**31), str(2**63), str(2**64), "1" + "0" * 25, "9" * 5000, "0x10", "1_0", "\u0661\u0662", "\u00b2"),
)
TEXTS = (
    *(
        "",
        " ",
        ",",
        "=",
        ":",
        ":::",
        "a=b=c",
        "a,a",
        "-",
        "--",
        "%s%n{0}",
        "[red]x[/blue]",
        "'",
        '"',
        "\\",
        "all",
        "\udcff",
    ),
    *(
        "\u0436" * 50,
        "\u202e\U0001f600",
        "\x01\x1b[31m\x7f",
        "\n\r\t",
        "[" * 20_000,
        "{" * 20_000,
        "(" * 20_000,
        "a" * 20_000,
    ),
    *("{0..99999999999999999999}", "x{0..2}", "127.0.0.1:99999", "[::1", "http://", "1:0", "0:1", "9,x"),
)
PATHS = ("nowhere/x", "folder", "/proc/self/mem", "empty/below", "x" * 300, *FILES)
"""What cannot be read or written, and what can but holds nothing of use. `/proc/self/mem` opens, and no byte of it
can be read, by root neither."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_UNREACHABLE = "127.0.0.1:1"
_BASE: dict[str, tuple[str, ...]] = {
    "simulate": ("-n", "3"),
    "load": ("-n", "3", "--target", _UNREACHABLE, "--connect-timeout", "0.05"),
    "top": ("--target", _UNREACHABLE),
    "faults": ("--target", _UNREACHABLE),
}
"""What keeps a command short, or from dialling anybody. The options of a case come later, and win."""


@dataclass(frozen=True, slots=True)
class Case:
    """A command line, and the number that draws it again."""

    number: int
    arguments: tuple[str, ...]

    @property
    def title(self) -> str:
        """One line that shows it."""
        shown = (repr(one if len(one) < 80 else f"{one[:60]}... {len(one)} characters") for one in self.arguments)
        return f"case {self.number}: lorrery {' '.join(shown)}"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A subcommand that does something: its words, what it takes, and values from the examples in its help."""

    words: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    examples: dict[str, tuple[str, ...]]


@cache
def leaves() -> tuple[Leaf, ...]:
    """Return every subcommand."""
    return tuple(leaf for part in PARTS for leaf in _leaves((part,)))


def _leaves(words: tuple[str, ...]) -> Iterator[Leaf]:
    command = typer.main.get_command(part_named(words[0]))
    commands: dict[str, Any] = getattr(command, "commands", {})
    for name, leaf in commands.items() or [("", command)]:
        parameters = tuple(one for one in leaf.params if one.name not in ("help", "version"))
        found: dict[str, list[str]] = {}
        for option, value in re.findall(r"(--?[a-z-]+)[ =]('[^']*'|[^\s-]\S*)", leaf.help or ""):
            found.setdefault(option, []).append(value.strip("'"))
        yield Leaf((*words, name) if name else words, parameters, {key: tuple(all_) for key, all_ in found.items()})


@cache
def setting_keys() -> tuple[str, ...]:
    """Return the dotted name of every setting."""
    return tuple(_keys(Settings, ""))


def _keys(model: type[pydantic.BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        sections = [one for one in (field.annotation, *typing.get_args(field.annotation)) if _is_section(one)]
        if not sections:
            yield prefix + name
        for section in sections:
            yield from _keys(section, f"{prefix}{name}.")


def _is_section(annotation: object) -> TypeGuard[type[pydantic.BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)


def draw_case(seed: int, number: int) -> Case:
    """Draw a case: most often one wrong value, now and then several."""
    rng = random.Random(f"{seed} {number}")
    leaf = leaves()[number % len(leaves())] if rng.random() < 0.3 else rng.choices(leaves(), _weights())[0]
    arguments = [*leaf.words, *_BASE.get(leaf.words[0], ())]
    if leaf.words[0] == "serve" and rng.random() < 0.5:
        arguments.append("--print-config")
    for parameter in rng.sample(leaf.parameters, k=min(rng.choice((1, 1, 1, 2, 3)), len(leaf.parameters))):
        arguments += _given(rng, parameter, leaf)
    return Case(number, tuple(arguments))


def _weights() -> list[int]:
    return [len(leaf.parameters) for leaf in leaves()]


def _given(rng: random.Random, parameter: Parameter, leaf: Leaf) -> list[str]:
    if not isinstance(parameter, TyperOption):
        return [_value(rng, ())]
    option = rng.choice([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return [option]
    if option == "--set":
        return [option, f"{rng.choice(setting_keys())}={_value(rng, ())}"]
    return [option, _value(rng, tuple(one for name in parameter.opts for one in leaf.examples.get(name, ())))]


def _value(rng: random.Random, examples: tuple[str, ...]) -> str:
    if examples and rng.random() < 0.5:
        return _mutated(rng, rng.choice(examples))
    return rng.choice(rng.choice((NUMBERS, NUMBERS, TEXTS, PATHS)))


def _mutated(rng: random.Random, text: str) -> str:
    """Return an example with another number, cut off, doubled, or with something behind it."""
    numbers = list(_NUMBER.finditer(text))
    kind = rng.randrange(5)
    if numbers and kind < 2:
        match = rng.choice(numbers)
        return text[: match.start()] + rng.choice(NUMBERS) + text[match.end() :]
    if kind == 2:
        return text[: rng.randrange(len(text) + 1)]
    return text + rng.choice((f",{text}", rng.choice(TEXTS), rng.choice(NUMBERS)))


def make_files(folder: Path) -> None:
    """Write what `PATHS` names."""
    for name, content in FILES.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_text(content)
