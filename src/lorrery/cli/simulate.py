"""`lorrery simulate`: runs the cluster of a settings file under a virtual clock."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from lorrery.cli.flags import CONFIG_HELP, VersionOption, takes_deployment, with_deployment
from lorrery.loadgen.flags import Out, Report, check_report, takes_load_options
from lorrery.loadgen.options import load_options
from lorrery.loadgen.report import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_OK
from lorrery.loadgen.report_files import check_folder, write_report
from lorrery.loadgen.table import print_report
from lorrery.scheduler.core.facts import Subscriber
from lorrery.service.commands import Command, command_app, command_options, takes
from lorrery.service.entry_point import stop_then_exit
from lorrery.service.errors import FormatError, LorreryError, SettingsError, exit_in_words
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.files.writing import whole_file
from lorrery.service.installed import VERSION
from lorrery.service.names import cut
from lorrery.service.options import given_to
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.reading import key_of
from lorrery.simulator.interface import checked_observers, prepare
from lorrery.simulator.options import Observers, Scenario, SimulationOptions, Watch
from lorrery.simulator.options import Progress as RunProgress
from lorrery.simulator.run import SimulatedRun
from lorrery.simulator.sweep.flags import Sweeps, Where
from lorrery.view.terminal import table_console
from lorrery.vocabulary.adapters import AdapterFigures
from lorrery.vocabulary.files import RECORD_FILE, STEPS_FILE
from lorrery.worker.device.basis import grounds, in_one_line, slow_kernels

if TYPE_CHECKING:
    from lorrery.simulator.replay.journal import Journal
    from lorrery.simulator.replay.parts import Replayed

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
        if steps or perfetto or record is not None or observers.metrics is not None:
            raise SettingsError("--steps, --perfetto, --record and --metrics are for a single run; leave out --sweep")
        if serve is not None:
            raise SettingsError("--serve is for a single run; leave out --sweep")
        from lorrery.simulator.sweep.run import sweep

        asked = config, tuple(overrides), options, simulation
        raise typer.Exit(sweep(context, sweeps, asked, out, where, with_page=report))
    if where != Where():
        raise SettingsError("--seeds, --jobs, --backend and --backend-address are for sweeps; add --sweep KEY=VALUES")
    run = prepare(Scenario(config, options, overrides=overrides, **vars(simulation)))
    rule = next((key for key in map(key_of, overrides) if f"{key}.".startswith("autoscaler.")), "autoscaler.enabled")
    if rule != "autoscaler.enabled" and not run.settings.is_autoscaled:
        raise SettingsError(f"--set {cut(rule)} needs an autoscaler: add --autoscale")
    if serve is not None:
        if steps or perfetto or record is not None or observers.metrics is not None:
            raise SettingsError("--steps, --perfetto, --record and --metrics do not go with --serve")
        raise typer.Exit(_serve(run, serve, out, table_console(), with_page=report))
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
            from lorrery.simulator.subscribers.step_files import StepWriter

            written.append(out / STEPS_FILE)
            subscribers.append(StepWriter(_text(written[-1], stack)))
        if out is not None and perfetto:
            from lorrery.simulator.subscribers.step_files import TraceWriter

            written.append(out / TRACE_FILE)
            trace = TraceWriter(_text(written[-1], stack))
            stack.callback(trace.close)
            subscribers.append(trace)
            observers = replace(observers, on_end=trace.ended)
        stop_then_exit(run.stop)
        if sys.stderr.isatty():
            observers = replace(observers, watch=stack.enter_context(_progress_bar()))
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
    if observers.metrics is not None:
        console.print(f"metrics   {observers.metrics}", style="dim", highlight=False, soft_wrap=True)
    return report.exit_code


@contextmanager
def _progress_bar() -> Iterator[Watch]:
    """Show a run's progress on standard error: requests, simulated time, and its speed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # slow to import

    with Progress(
        TextColumn("[bold]simulate"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    ) as progress:
        bar = progress.add_task("", total=None, figures="")

        def look(run: RunProgress) -> None:
            elapsed = progress.tasks[0].elapsed or 0.0
            rate = run.simulated_seconds / elapsed if elapsed else 0.0
            progress.update(
                bar,
                completed=run.num_ended,
                total=run.num_requests or None,
                figures=f"{run.simulated_seconds:,.0f} s simulated, x {rate:,.0f}",
                refresh=True,
            )

        yield look


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


def _serve(run: SimulatedRun, listen: str, out: Path | None, console: Console, *, with_page: bool) -> int:
    """Serve a run, print its report once its caller has finished, and return the exit code.

    A caller may finish before the workload has ended: this is no interruption, though open requests are cut off.

    Args:
        run: a run that has not started.
        listen: HOST:PORT.
        out: folder for the report; None: it is only printed.
        console: where to print.
        with_page: write report.html too.
    """
    import asyncio  # slow to import, as are these

    from lorrery.service.settings.sections import checked_address
    from lorrery.simulator.lockstep import serve
    from lorrery.simulator.virtual_cluster import VirtualCluster

    listen = checked_address("--serve", listen)
    if out is not None:
        check_folder(out)
    cluster = VirtualCluster(run=run)

    def listening(address: str) -> None:
        console.print(f"serving lorrery.v1.SimulationService at {address}", highlight=False, soft_wrap=True)

    try:
        result = asyncio.run(serve(cluster, listen, run.settings.server_tls, listening))
    except SystemExit as error:  # of a plug-in
        raise LorreryError(exit_in_words(error)) from None
    if result is None:
        return EXIT_INTERRUPTED
    print_report(result.report, console)
    if out is not None:
        written = list(result.write(out))
        if with_page:
            # Imported after the run: it would only slow the start.
            from lorrery.view.reports.report import report as make_page

            written.append(make_page(out))
        for path in written:
            console.print(f"report    {path}", style="dim", highlight=False, soft_wrap=True)
    return EXIT_FAILURES if result.report.summary.num_failed else EXIT_OK


def replay_journal(path: Path, console: Console) -> int:
    """Replay a journal and print what was compared; return the exit code: 0 if all is equal, 1 if not.

    Raises:
        FormatError: the file cannot be read, or is no journal.
        SettingsError: its settings do not work here, such as a missing file that they name.
    """
    from lorrery.simulator.replay.journal import read_journal  # half as much again to import as a run
    from lorrery.simulator.replay.parts import parts_of
    from lorrery.simulator.replay.replay import replay

    journal = read_journal(path)
    result = replay(journal, parts_of(journal, path))
    _print_replay(path, journal, result, console)
    return 1 if result.differences else 0


def _print_replay(path: Path, journal: "Journal", result: "Replayed", console: Console) -> None:
    if journal.version != VERSION:
        console.print(f"{path} was written by lorrery {journal.version}; this is {VERSION}", highlight=False)
    if journal.cut_line is not None:
        console.print(f"{path}:{journal.cut_line}: the line is cut off and is left out", highlight=False)
    if not journal.complete:
        console.print(
            f"{path} has no end: the scheduler runs, or was killed; compared is what it had flushed", highlight=False
        )
    console.print(
        f"compared {result.num_requests} requests, {result.num_plans} plans, {result.num_steps} steps and"
        f" {result.num_tokens} tokens on {result.num_workers} workers",
        highlight=False,
    )
    console.print(
        f"derived: where {result.num_derived} of {result.num_placed} requests went; the others had no choice"
        ", or it is given",
        highlight=False,
    )
    console.print(
        f"given: {result.num_requests} arrivals, {result.num_cancels} cancels, {result.num_late} of them late;"
        f" {result.num_gaps} gaps; {result.num_lost} workers that left",
        highlight=False,
    )
    if result.tally.by_adapter:
        console.print(f"adapters: {AdapterFigures.total(result.tally.by_adapter.values())}", highlight=False)
    if not result.num_steps and not result.differences:
        console.print("nothing to compare: no step is in it", highlight=False)
    elif not result.differences:
        console.print("equal: every batch, every time and every token", highlight=False)
    for line, what in result.differences:
        console.print(f"{path}:{line}: {what}", style="red", highlight=False, markup=False)
