"""Every command that README and docs show in `sh` blocks exists, and the cheap ones are run.

`<!-- not run: REASON -->` before a block exempts it from being run, never from being parsed.
"""

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main
from typer.testing import CliRunner

from lorrery.cli import app as cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

RUN_HERE = {"simulate", "plan", "validate", "cache", "init"}
"""Subcommands that end soon by themselves. The others have tests or CI stages of their own: tests/cli, .ci/run."""
FOREIGN = {
    "buf",
    "cat",
    "cd",
    "curl",
    "dask",
    "docker",
    "git",
    "grpcurl",
    "helm",
    "jq",
    "kill",
    "kubectl",
    "open",
    "openssl",
    "pip",
    "ps",
    "smg",
}
"""Programs that are not ours to check. A new one is added here on purpose."""

_BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\s*)?^```sh\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_HERE_DOCUMENT = re.compile(r"<<'?(\w+)'?\n.*?^\1$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"[A-Z_]+=.*")


class Command(NamedTuple):
    """One line of a block: `PYTHONPATH=docs/examples .venv/bin/lorrery up` is variables, `lorrery`, `up`."""

    where: str
    variables: dict[str, str]
    program: str
    arguments: list[str]
    is_exempt: bool


def commands(page: Path) -> Iterator[Command]:
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, block.start('text')) + 1}"
        script = _HERE_DOCUMENT.sub("", block["text"]).replace("\\\n", " ")
        for line in script.splitlines():
            for words in _split(shlex.shlex(line, posix=True, punctuation_chars="|&;<>")):
                variables = dict(word.split("=", 1) for word in takewhile(_VARIABLE.fullmatch, words))
                program, *arguments = words[len(variables) :]
                yield Command(where, variables, program.removeprefix(".venv/bin/"), arguments, bool(block["reason"]))


def _split(lexer: shlex.shlex) -> Iterator[list[str]]:
    """Yield the words of each command of a line; what stands behind a pipe or a redirection is left out."""
    lexer.whitespace_split = True
    words: list[str] = []
    skipping = False
    for word in [*lexer, ";"]:
        if word in ("&&", ";", "&"):
            if words:
                yield words
            words, skipping = [], False
        elif set(word) <= set("|<>"):
            skipping = True
        elif not skipping:
            words.append(word)


ALL = [command for page in PAGES for command in commands(page)]
CHEAP = [
    command
    for command in ALL
    if command.program == "lorrery" and command.arguments[0] in RUN_HERE and not command.is_exempt
]


def named(command: Command) -> str:
    return f"{command.where}-{' '.join([command.program, *command.arguments[:2]])}"


@pytest.mark.parametrize("command", ALL, ids=named)
def test_a_command_exists_with_its_options(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if command.program == "lorrery":
        parse_lorrery(command.arguments)
    elif command.program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {one for one in command.arguments if "=" not in one} <= set(targets)
    elif command.program == "python" and command.arguments[:1] == ["-m"]:
        assert find_spec(command.arguments[1]) is not None
    elif command.program != "python":
        assert command.program in FOREIGN


def parse_lorrery(arguments: list[str]) -> None:
    """Parse as `lorrery` does, and run nothing; an unknown subcommand or option is an exception."""
    name, *rest = arguments
    if name.startswith("-"):
        assert name in ("--help", "-h", "--version")
        return
    assert name in cli.PARTS, f"no subcommand {name}"
    parser = typer.main.get_command(cli.part_named(name))
    if hasattr(parser, "commands"):
        parser = parser.commands[rest.pop(0)]
    if "--help" not in rest:
        parser.make_context(name, rest)


@pytest.mark.parametrize("command", CHEAP, ids=named)
def test_a_cheap_command_does_what_the_page_promises(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("deploy", "docs", "lab", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    if (path := command.variables.get("PYTHONPATH")) is not None:
        monkeypatch.syspath_prepend(tmp_path / path)
    name, *arguments = command.arguments
    result = CliRunner().invoke(cli.part_named(name), shortened(name, arguments))
    assert result.exit_code == 0, (result.output, result.exception)


def shortened(name: str, arguments: list[str]) -> list[str]:
    """Let a simulation have few requests, and a sweep one value of each key, and one process."""
    if name != "simulate":
        return arguments
    swept = [False, *(option == "--sweep" for option in arguments)]
    short = [word.split(",")[0] if is_swept else word for word, is_swept in zip(arguments, swept, strict=False)]
    one_process = ["--jobs", "1"] if any(swept) else []
    return [*short, "--num-requests", "20", *one_process]


def test_a_page_with_an_unknown_option_is_found() -> None:
    with pytest.raises(Exception, match="No such option: --no-such"):
        parse_lorrery(["simulate", "--no-such", "1"])
    with pytest.raises(AssertionError, match="no subcommand"):
        parse_lorrery(["simulat"])


def test_a_block_is_read_as_a_shell_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__name__ + ".ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: takes an hour -->\n```sh\n"
        "A=1 .venv/bin/lorrery up --set \"x='#'\" \\\n  --workers 2  # four\n"
        "python - <<'EOF'\nimport os\nEOF\n"
        "make lint && curl -s there | grep x\n```\n",
        encoding="utf-8",
    )
    found = list(commands(page))
    assert [(one.program, one.arguments) for one in found] == [
        ("lorrery", ["up", "--set", "x='#'", "--workers", "2"]),
        ("python", ["-"]),
        ("make", ["lint"]),
        ("curl", ["-s", "there"]),
    ]
    assert found[0].variables == {"A": "1"}
    assert all(one.is_exempt for one in found)
