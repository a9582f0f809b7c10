"""`lorrery simulate`: runs the cluster of a settings file under a virtual clock."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from lorrery.cli.basis_text import in_one_line
from lorrery.cli.config_option import CONFIG_HELP
from lorrery.cli.deployment_flags import takes_deployment, with_deployment
from lorrery.cli.version import VersionOption
from lorrery.loadgen.flags import Out, Report, check_report, takes_load_options
from lorrery.loadgen.options import load_options
from lorrery.loadgen.report_files import check_folder, write_report
from lorrery.loadgen.table import print_report
from lorrery.scheduler.core.facts import Subscriber
from lorrery.service.commands import Command, command_app, command_options, takes
from lorrery.service.errors import FormatError, LorreryError, SettingsError, exit_in_words
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.files.writing import whole_file
from lorrery.service.interrupt import stop_then_exit
from lorrery.service.names import cut
from lorrery.service.options import given_to
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.reading import key_of
from lorrery.simulator.interface import checked_observers, prepare
from lorrery.simulator.options import Observers, Scenario, SimulationOptions
from lorrery.simulator.run import SimulatedRun
from lorrery.simulator.sweep.flags import Sweeps, Where
from lorrery.view.terminal import table_console
from lorrery.vocabulary.run_files import RECORD_FILE, STEPS_FILE
from lorrery.worker.device.basis import grounds, slow_kernels

TRACE_FILE = "trace.json"
_SIMULATION, _OUTPUT = "Simulation", "Output"
_PERFETTO = "--perfetto"
_USUAL = "\0"
"""Stands for the default record file; no file can have this name."""


class _Command(Command):
    """Lets `--trace` and `--record` be given without a value.

    `--trace` alone stands for `--perfetto`; with a value it is the workload's trace, as in `load`. `--record` alone
    stands for the default file in DIR.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click's type
        followed = [*args[1:], "-"]
        alone = {"--trace": _PERFETTO, "--record": f"--record={_USUAL}"}
        args = [
            alone.get(one, one) if after.startswith("-") else one
            for one, after in zip(args, followed, strict=False)  # without arguments too
        ]
        return super().parse_args(ctx, args)


app = command_app()


@app.command(cls=_Command)
@takes_deployment(before="autoscale")
@takes(command_options(SimulationOptions), before="autoscale")
@takes_load_options(before="sweeps", live=False)
@takes(command_options(Where), before="out")
@takes(command_options(Observers), before="version")
def simulate(
    context: typer.Context,
    config: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            envvar="LORRERY_CONFIG",
            show_envvar=False,
            show_default=False,
            help=CONFIG_HELP,
            rich_help_panel=_SIMULATION,
        ),
    ] = DEFAULT_SETTINGS,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override one setting; repeatable; highest precedence.",
            rich_help_panel=_SIMULATION,
        ),
    ] = None,
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale",
            help="Scale workers by the rule of \\[autoscaler]; --workers is the initial number.",
            rich_help_panel=_SIMULATION,
        ),
    ] = False,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default=False,
            help="Run in lockstep with a gRPC client (SimulationService), which scales workers and advances time.",
            rich_help_panel=_SIMULATION,
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay the journal of a live scheduler (scheduler.journal) and compare; cannot be combined with"
            " other options.",
            rich_help_panel=_SIMULATION,
        ),
    ] = None,
    sweeps: Sweeps = None,
    out: Out = None,
    report: Report = True,
    steps: Annotated[
        bool, typer.Option("--steps", help=f"Write every step to DIR/{STEPS_FILE}.", rich_help_panel=_OUTPUT)
    ] = False,
    perfetto: Annotated[
        bool,
        typer.Option(
            _PERFETTO,
            help=f"Write a trace of batches to DIR/{TRACE_FILE}, for ui.perfetto.dev or chrome://tracing; as"
            " --trace without a FILE does.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    version: VersionOption = False,
    **given: Any,  # noqa: ANN401  the table's options
) -> None:
    """Simulate a cluster under a virtual clock: hours of traffic in seconds.

    Uses the same settings, policies, caches, devices and workloads as a live cluster, and writes the
    same report, without sockets or waiting, and with the same result each time. The cost of the
    services themselves is left out: the network, the router, a machine that falls behind.

    Examples:
      lorrery simulate --rate 20 --duration 3600 --adapters all
      lorrery simulate --engine vllm --model Llama-3.1-70B --gpu H200-SXM --tp 4 -c 64 --input 1024 --output 256
      lorrery simulate --workload azure --adapters all --out out/azure --steps --perfetto
      lorrery simulate --workload azure --adapters all --out out/azure --record
      lorrery simulate --set 'workers=[{gpu = "H100-SXM"}, {count = 2, gpu = "L40S"}]' --rate 20
      lorrery simulate --set scheduler.policy=vtc_fair --workers 4 -n 100000 --rate 40
      lorrery simulate --autoscale --set autoscaler.target=2 --rate 10 --duration 3600
      lorrery simulate --fault worker_loss,at=30,worker=worker-1,for=10
      lorrery simulate --fault slow_worker,at=0,worker=worker-0,factor=1.5
      lorrery simulate --adapters all --fault adapter_load_failure,at=10,for=20
      lorrery simulate --sweep rate=5,10,20 --sweep scheduler.policy=req_queue,vtc_fair --out out/sweep

    The first Ctrl-C or SIGTERM ends the run and reports it so far; a second one ends the process at once.

    Exit code: 0 all completed, 1 some failed (of a sweep: points), 2 wrong usage, 130 interrupted.
    """
    del version
    if journal is not None:
        _refuse_beside_journal(context)
        from lorrery.cli.simulate_journal import replay_journal  # half as much again to import as a run

        try:
            raise typer.Exit(replay_journal(journal, table_console()))
        except FormatError as error:  # exit code 1 says that the replay differs
            raise SettingsError(str(error)) from None
    options = load_options(given, live=False)
    simulation = SimulationOptions(**given_to(SimulationOptions, given))
    observers = Observers(**given_to(Observers, given))
    where = Where(**given_to(Where, given))
    record = observers.record
    check_report(out, report=report)
    overrides = with_deployment(given, overrides)
    if autoscale:
        overrides = [*overrides, "autoscaler.enabled=true"]
    if sweeps:
        if steps or perfetto or record is not None:
            raise SettingsError("--steps, --perfetto and --record are for a single run; leave out --sweep")
        if serve is not None:
            raise SettingsError("--serve is for a single run; leave out --sweep")
        from lorrery.simulator.sweep.run import sweep

        asked = config, tuple(overrides), options, simulation
        raise typer.Exit(sweep(context, sweeps, asked, out, where, with_page=report))
    if where != Where():
        raise SettingsError("--jobs, --backend and --backend-address are for sweeps; add --sweep KEY=VALUES")
    run = prepare(Scenario(config, options, overrides=overrides, **vars(simulation)))
    rule = next((key for key in map(key_of, overrides) if f"{key}.".startswith("autoscaler.")), "autoscaler.enabled")
    if rule != "autoscaler.enabled" and not run.settings.is_autoscaled:
        raise SettingsError(f"--set {cut(rule)} needs an autoscaler: add --autoscale")
    if serve is not None:
        if steps or perfetto or record is not None:
            raise SettingsError("--steps, --perfetto and --record do not go with --serve")
        from lorrery.cli.simulate_served import serve_run

        raise typer.Exit(serve_run(run, serve, out, table_console(), with_page=report))
    if observers.record_every is not None and record is None:
        raise SettingsError("--record-every needs --record")
    if record == "":
        raise SettingsError("--record: the path is empty; name one, or give --record alone for the usual file in DIR")
    if record == _USUAL:
        if out is None:
            raise SettingsError("--record without a FILE needs --out DIR")
        observers = replace(observers, record=out / RECORD_FILE)
    raise typer.Exit(_run(run, out, observers, steps=steps, perfetto=perfetto, with_page=report))


def _run(
    run: SimulatedRun,
    out: Path | None,
    observers: Observers,
    *,
    steps: bool,
    perfetto: bool,
    with_page: bool,
) -> int:
    """Run the simulation and write the requested files."""
    if out is not None:
        check_folder(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--out {out}: {error.strerror}") from None
    elif steps or perfetto:
        raise SettingsError("--steps and --perfetto need --out DIR")
    observers = checked_observers(observers)
    console = table_console()
    written: list[Path] = []
    with ExitStack() as stack:
        subscribers: list[Subscriber] = []
        if out is not None and steps:
            from lorrery.simulator.subscribers.steps import StepWriter

            written.append(out / STEPS_FILE)
            subscribers.append(StepWriter(_text(written[-1], stack)))
        if out is not None and perfetto:
            from lorrery.simulator.subscribers.trace import TraceWriter

            written.append(out / TRACE_FILE)
            trace = TraceWriter(_text(written[-1], stack))
            stack.callback(trace.close)
            subscribers.append(trace)
            observers = replace(observers, on_end=trace.ended)
        stop_then_exit(run.stop)
        if sys.stderr.isatty():
            from lorrery.cli.progress_bar import ProgressBar

            show = stack.enter_context(ProgressBar())
            observers = replace(observers, watch=show.look)
        run.observers = replace(observers, subscribers=subscribers)
        try:
            report = run.run()
        except Exception as error:
            if not isinstance(error, LorreryError | OSError) and (named := _plug_ins(run.settings)):
                error.add_note(f"{', '.join(named)} may have changed what it may only read: `lorrery validate policy`")
            raise
        except BaseException as error:  # of a plug-in: a signal stops the run and raises nothing
            raise LorreryError(exit_in_words(error)) from None
    print_report(report, console, _bases(run))
    if out is not None:
        written = [*write_report(report, out), *written]
        if with_page:
            # Imported after the run: it would only slow the start.
            from lorrery.view.reports.report import report as make_page

            written.append(make_page(out))
        for path in written:
            console.print(f"report    {path}", style="dim", highlight=False, soft_wrap=True)
    if observers.record is not None:
        shown = f"record    {observers.record} (lorrery web {observers.record})"
        console.print(shown, style="dim", highlight=False, soft_wrap=True)
    return report.exit_code


def _plug_ins(settings: Settings) -> list[str]:
    own = settings.scheduler
    chosen = {"policy": own.policy, "batching": own.batching or "", "placement": own.placement}
    return [f"scheduler.{key} = {name}" for key, name in chosen.items() if ":" in name]


def _text(path: Path, stack: ExitStack) -> TextIO:
    """Open a file that appears, complete, when the run is over."""
    return stack.enter_context(TextIOWrapper(stack.enter_context(whole_file(path)), encoding="utf-8", newline=""))


def _bases(run: SimulatedRun) -> list[tuple[str, str]]:
    """Return notes on the basis of the figures for each kind of worker, and on slow kernels."""
    found: dict[str, dict[str, None]] = {}
    slow: dict[str, None] = {}
    for device in {id(device): device for device in run.devices}.values():
        line = in_one_line(grounds(device.deployment, device.step_time.name, getattr(device.step_time, "account", "")))
        found.setdefault(line, {})[device.deployment.gpu.name] = None
        slow |= dict.fromkeys(slow_kernels(device.deployment, device.step_time.name))
    several = len(found) > 1
    notes = [
        ("" if number else "basis", f"{', '.join(gpus)}: {line}" if several else line)
        for number, (line, gpus) in enumerate(found.items())
    ]
    return [*notes, *(("slow", line) for line in slow)]


def _refuse_beside_journal(context: typer.Context) -> None:
    """Refuse options that have no effect in a replay, since the result would be read as obtained with them."""
    given = [
        max(option.opts, key=len)
        for option in context.command.params
        if option.name is not None
        and option.name != "journal"
        and (source := context.get_parameter_source(option.name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        why = "--journal replays a run under the settings and with the requests that it was recorded with"
        raise SettingsError(f"{why}; leave out {', '.join(given)}")
