"""`lorrery serve`: runs engines that answer like `vllm serve`, with the flags of vLLM and of its stand-ins.

`flags.py` and `other_flags.toml` are the tables of flags, `arguments.py` arranges a command line, `settings.py` turns
flags into settings, `run.py` runs them; `host.py` runs the engines of `lorrery.engines`.
"""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from lorrery.cli.flags import VersionOption, takes_flags
from lorrery.cli.serve.arguments import arranged
from lorrery.cli.serve.flags import FLAGS
from lorrery.service.commands import Command, command_app
from lorrery.service.local.processes import ForkServer

app = command_app()


class _Command(Command):
    """Accepts arguments in the forms of vLLM and its stand-ins."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click's type
        return super().parse_args(ctx, arranged(args, lambda line: typer.echo(f"lorrery serve: {line}", err=True)))


@app.command(cls=_Command)
@takes_flags(FLAGS)
def serve(
    model_name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Model, by its name in the catalogue.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override one of Lorrery's settings; repeatable; highest precedence."
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", "--dry-run", help="Print the settings equivalent to the flags, and exit.")
    ] = False,
    replicas: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Run N such engines, independent of each other.")
    ] = None,
    ports: Annotated[
        str | None,
        typer.Option(metavar="PORTS", help="Their ports: 8000-8002, or 8000,8001,8002; default: free ones."),
    ] = None,
    announce: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write their addresses to this file, as JSON, once all serve.")
    ] = None,
    version: VersionOption = False,
    **given: Any,  # noqa: ANN401  the table's flags
) -> None:
    """Run an engine that behaves like vllm serve, on a mock GPU, or a fleet of them.

    Scheduler, workers and router run on this machine; OpenAI's, vLLM's and S-LoRA's routes are served at --port. Prints
    one line once it is ready; Ctrl-C or SIGTERM lets running requests finish, then stops it. If a worker dies, it stops
    with exit code 1.

    With --replicas or --ports it runs a fleet: one such engine per port, each with a ready line of its own, printed
    once all serve. An engine whose worker dies stops alone. --announce writes the same as JSON.

    Takes the flags of vLLM, llm-d-inference-sim and the Dynamo mocker under their names. Those without effect here are
    taken with a line that says so; those whose meaning would be lost are refused, with what to do instead.
    docs/serve.md lists them all. --print-config prints the equivalent settings, for lorrery up --config or lorrery
    simulate --config.

    Examples:
      lorrery serve meta-llama/Llama-3.1-8B-Instruct
      lorrery serve --model Llama-2-7B --max-loras 4 --max-num-seqs 256 --lora-modules sql=16 chat=8 --port 8000
      lorrery serve Qwen/Qwen2.5-7B --gpu A100-80-SXM --max-model-len 16k --speedup-ratio 10
      lorrery serve mistralai/Mistral-7B-v0.1 --lora-modules sql=8 --print-config
      lorrery serve Llama-3.1-8B --replicas 3 --ports 8000-8002
    """
    del version
    with nullcontext() if print_config else ForkServer() as fork_server:
        # Runs while the fork server imports the services.
        from lorrery.cli.serve.settings import engine_of, fleet_ports

        engine = engine_of(model_name, given, overrides or [])
        numbers = fleet_ports(replicas, ports, given)
        if fork_server is not None:
            from lorrery.cli.serve.run import run

            raise typer.Exit(asyncio.run(run(fork_server, engine, numbers, announce)))
    from lorrery.cli.serve.settings import settings_file

    typer.echo(settings_file(engine), nl=False)
