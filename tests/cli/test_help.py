"""Every command: its help in one style, and a word rather than a traceback where nothing is asked for."""

import shlex
import subprocess
import sys
from inspect import getdoc
from itertools import dropwhile, takewhile
from pathlib import Path

import click
import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from lorrery.cli.app import PARTS, part_named
from lorrery.service.errors import LorreryError

SERVICES = ("router", "scheduler", "worker")
RUN_FOR_LONG = {
    "up",
    "demo",
    "web",
    "validate",
    "validate vidur",
    "validate slora",
    "validate serving",
    "validate lora",
}
"""Without options they run a cluster, or replay what ships: tests of their own watch that."""
GROUPS = {"faults", "keys", "validate"}
"""Their commands have examples of their own."""
WITHOUT_OPTIONS = {
    "serve": (1, "no model is named"),
    "load": (1, "no cluster at 127.0.0.1:1 "),
    "top": (1, "lorrery up starts one"),
    "simulate": (0, "requests"),
    "compare": (0, "goodput"),
    "report": (2, "DIR"),
    "faults": (2, "set"),
    "faults set": (2, "RULE"),
    "faults add": (2, "RULE"),
    "faults list": (1, "UNAVAILABLE"),
    "faults clear": (1, "UNAVAILABLE"),
    "config": (0, "model = "),
    "plan": (0, "KV"),
    "calibrate": (2, "FILE"),
    "cache": (2, "corpus"),
    "tokenizer": (0, "shipped"),
    "certs": (2, "DIR"),
    "keys": (2, "new"),
    "keys new": (2, "--tenant"),
    "validate golden": (0, "0 failed"),
    "validate policy": (2, "MODULE:CLASS"),
    "init": (0, "cluster.toml"),
    "monitoring": (2, "DIR"),
    "validate steptime": (0, "MAPE"),
    "validate kernels": (0, "MAPE"),
}
"""Command -> exit code and a word of what it says."""


def app_of(part: str) -> typer.Typer:
    app: typer.Typer = part_named(part)
    return app


def command_of(name: str) -> click.Command:
    part, *rest = name.split()
    one = typer.main.get_command(app_of(part))
    for inner in rest:
        one = one.commands[inner]
    return one


def commands() -> list[str]:
    found = []
    for part in PARTS:
        command = typer.main.get_command(app_of(part))
        found.append(part)
        found += [f"{part} {name}" for name in getattr(command, "commands", ())]
    return found


def examples(text: str) -> list[str]:
    """The block under `Examples:`, without its indent."""
    lines = [line.strip() for line in text.splitlines()]
    if "Examples:" not in lines:
        return []
    block = dropwhile(lambda line: not line, lines[lines.index("Examples:") + 1 :])
    return list(takewhile(bool, block))


@pytest.mark.parametrize("command", [name for name in commands() if name not in RUN_FOR_LONG])
def test_without_options_a_command_works_or_says_what_it_needs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    part, *rest = command.split()
    if command in ("faults list", "faults clear"):
        rest += ["--target", "127.0.0.1:1"]
    if part == "load":  # at the default address a cluster may run
        rest = ["--target", "127.0.0.1:1", "--connect-timeout", "0.1"]
    if part == "top":
        rest = ["--target", "127.0.0.1:1"]
    result = CliRunner().invoke(app_of(part), rest)
    assert result.exception is None or isinstance(result.exception, SystemExit | LorreryError), result.exception
    code, word = WITHOUT_OPTIONS[command]
    assert (result.exit_code, word in result.output + str(result.exception)) == (code, True), result.output
    assert [file.name for file in tmp_path.iterdir()] == (["cluster.toml"] if command == "init" else [])


@pytest.mark.parametrize("command", commands())
def test_help_says_how_to_use_it(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    part, *rest = command.split()
    result = CliRunner().invoke(app_of(part), [*rest, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "--help" in result.output
    if command not in GROUPS:
        shown = examples(result.output)
        assert shown, result.output
        assert all(line.startswith("lorrery ") for line in shown), shown
        assert "\n   lorrery " in result.output  # the indent is kept


@pytest.mark.parametrize("command", commands())
def test_tables_of_the_settings_file_keep_their_brackets_in_help(command: str):
    one = command_of(command)
    for text in [one.help or "", *(getattr(option, "help", None) or "" for option in one.params)]:
        assert Text.from_markup(text).plain == text.replace("\\[", "["), (
            "Rich takes [name] for markup: write \\\\[name]"
        )


@pytest.mark.parametrize("command", [name for name in commands() if name not in GROUPS])
def test_examples_are_what_the_command_line_takes(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for line in examples(getdoc(command_of(command).callback)):
        _, named, *arguments = shlex.split(line)
        target = typer.main.get_command(app_of(named))
        while (inner := getattr(target, "commands", {}).get(arguments[0] if arguments else "")) is not None:
            target, arguments = inner, arguments[1:]
        for file in (Path(one) for one in arguments if Path(one).suffix in (".csv", ".jsonl", ".toml", ".txt")):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()  # the reader has it
        target.make_context(named, arguments)


@pytest.mark.parametrize("command", ["simulate", "load"])
def test_a_flag_that_only_leaves_something_out_shows_no_default(command: str) -> None:
    parameters = typer.main.get_command(part_named(command)).params
    leaving_out = [one for one in parameters if not "".join(one.opts).strip()]
    assert [one.secondary_opts for one in leaving_out] == [["--no-report"]]
    assert not any(one.show_default for one in leaving_out)


@pytest.mark.parametrize("service", SERVICES)
def test_services_have_the_same_style(service: str, tmp_path: Path):
    command = [sys.executable, "-m", f"lorrery.{service}", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert examples(done.stdout)
    assert f"[{service}]" in done.stdout  # a name in brackets is no markup


@pytest.mark.parametrize(
    ("part", "option", "value"),
    [("simulate", "--workers", "0"), ("load", "--rate", "fast"), ("plan", "--adapters", "-3")],
)
def test_a_wrong_value_is_shown_with_what_is_expected(part: str, option: str, value: str):
    app = part_named(part)
    result = CliRunner().invoke(app, [option, value], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"got '{value}'" in result.output
