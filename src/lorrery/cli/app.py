"""The `lorrery` command: looks up the part that a subcommand names and passes it the arguments.

Each part is imported only when it is called, so that `lorrery --help` is fast and one part cannot break another.
"""

import gc
import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from lorrery.service.commands import command_app
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.files.writing import NO_ROOM
from lorrery.service.installed import VERSION, core_is_compiled

PARTS = {
    "init": "Write a settings file to edit.",
    "config": "Show the effective settings, and where each comes from.",
    "up": "Run a cluster on this machine: scheduler, workers, router.",
    "serve": "Run one engine that behaves like vllm serve and takes its flags.",
    "load": "Send a workload to a cluster, and report what clients see.",
    "simulate": "Simulate a cluster under a virtual clock: hours of traffic in seconds.",
    "compare": "Compare policies on the same requests, with several seeds.",
    "web": "Show a running cluster or a simulation in the browser.",
    "top": "Show a running cluster or a simulation in the terminal, like top.",
    "report": "Write an HTML report of runs: latencies, where time went, what differs.",
    "faults": "Inject faults into requests, loads and workers of a running cluster.",
    "monitoring": "Write Prometheus' configuration, rules and alerts, and the Grafana dashboards.",
    "demo": "Run a cluster and play a real trace through it; takes about a minute.",
    "plan": "Estimate what a deployment can serve, and how many GPUs a rate needs.",
    "calibrate": "Fit a GPU's kernel constants to your own profile of it.",
    "cache": "Build a static prefix cache from a corpus of prompts.",
    "tokenizer": "Print the path of the shipped tokenizer, or copy it as a Hugging Face folder.",
    "certs": "Create a development CA, and certificates for each role in a cluster.",
    "keys": "Create API keys for clients.",
    "validate": "Compare the models with the programs and GPUs that they model.",
}
"""Subcommand -> its description."""
_ELSEWHERE = {"load": "loadgen.command", "top": "view.top.command", "web": "view.command"}
"""Subcommand -> the module whose `app` is its typer application, where that is not `cli.NAME`."""

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = command_app("A working model of a multi-tenant LoRA inference cluster that needs no GPU.", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lorrery {VERSION}, {'compiled' if core_is_compiled() else 'interpreted'} core")
        raise typer.Exit


@app.callback()
def _lorrery(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def part_named(name: str) -> typer.Typer:
    """Return the typer application of a subcommand, imported now."""
    part: typer.Typer = import_module(f"lorrery.{_ELSEWHERE.get(name, f'cli.{name}')}").app
    return part


def _run_part(context: typer.Context) -> None:
    name = context.info_name or ""
    part = part_named(name)
    gc.freeze()  # code and classes: the collector need not scan them again
    gc.enable()
    part(args=context.args, prog_name=f"lorrery {name}")


for _name, _help in PARTS.items():
    app.command(_name, help=_help, add_help_option=False, context_settings=_PASS_ON)(_run_part)


def run() -> None:
    """Run the command line. Exit codes: 1 for an error, 2 for wrong settings or flags, 128 + n after signal n.

    The code is the same if the reader of standard output has gone: `service.entry_point` lets writes continue.
    """
    try:
        app(prog_name="lorrery")
    except LorreryError as error:
        typer.echo(f"lorrery: error: {error}", err=True)
        sys.exit(2 if isinstance(error, SettingsError) else 1)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        what = f"{error.strerror}: the standard output, or a file, could not be written"
        if error.filename is not None:
            what = f"{error.filename}: {error.strerror}"
        typer.echo(f"lorrery: error: {what}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(1)
