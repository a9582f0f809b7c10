"""`lorrery simulate`: runs the cluster of a settings file under a virtual clock."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from lorrery.cli.flags import CONFIG_HELP, VersionOption, takes_deployment, with_deployment
from lorrery.loadgen.flags import Out, Report, check_report, takes_load_options
from lorrery.loadgen.options import OPTIONS, load_options
from lorrery.loadgen.report import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_OK
from lorrery.loadgen.report_files import check_folder, write_report
from lorrery.loadgen.table import print_report
from lorrery.scheduler.core.facts import Subscriber
from lorrery.service.commands import Command, command_app, command_options, takes
from lorrery.service.entry_point import stop_then_exit
from lorrery.service.errors import FormatError, LorreryError, SettingsError, exit_in_words
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.files.writing import whole_file
from lorrery.service.names import cut
from lorrery.service.options import given_to, options_of
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.reading import key_of
from lorrery.simulator.interface import checked_observers, prepare
from lorrery.simulator.options import Observers, Scenario, SimulationOptions, Watch
from lorrery.simulator.options import Progress as RunProgress
from lorrery.simulator.run import SimulatedRun
from lorrery.simulator.sweep.flags import Sweeps, Where
from lorrery.view.terminal import table_console
from lorrery.vocabulary.files import RECORD_FILE, RECORDED_FOLDER, REPORT_FILE, STEPS_FILE
from lorrery.worker.device.basis import grounds, in_one_line, slow_kernels

if TYPE_CHECKING:
    from lorrery.simulator.counterfactual import Prepared

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
            help="Play the journal of a live scheduler (scheduler.journal): under other settings (--set,"
            " --workers, --gpu, ...), to compare each request with the recorded run; without any the very same"
            " decisions, to compare each step.",
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
      lorrery simulate --journal journal.jsonl --set scheduler.policy=fcfs --gpu L40S --workers 4 --out out/other
      lorrery simulate --sweep rate=5,10,20 --sweep scheduler.policy=req_queue,vtc_fair --out out/sweep

    The first Ctrl-C or SIGTERM ends the run and reports it so far; a second one ends the process at once.

    Exit code: 0 all completed, 1 some failed (of a sweep: points), 2 wrong usage, 130 interrupted.
    """
    del version
    if journal is not None:
        _refuse_beside_journal(context)
        overrides = [*with_deployment(given, overrides), *["autoscaler.enabled=true"] * autoscale]
        asked = given_to(SimulationOptions, given) | {"overrides": overrides}
        watching = Observers(**given_to(Observers, given))
        try:
            code = _counterfactual(journal, asked, watching, out, steps=steps, perfetto=perfetto, with_page=report)
            raise typer.Exit(code)
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

        common = config, tuple(overrides), options, simulation
        raise typer.Exit(sweep(context, sweeps, common, out, where, with_page=report))
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
    raise typer.Exit(_run(run, out, observers, steps=steps, perfetto=perfetto, with_page=report))


def _recording(observers: Observers, out: Path | None) -> Observers:
    """Return the observers with the usual path in place of what stands for it.

    Raises:
        SettingsError: no path for the record, or no record for its interval.
    """
    record = observers.record
    if observers.record_every is not None and record is None:
        raise SettingsError("--record-every needs --record")
    if record == "":
        raise SettingsError("--record: the path is empty; name one, or give --record alone for the usual file in DIR")
    if record != _USUAL:
        return observers
    if out is None:
        raise SettingsError("--record without a FILE needs --out DIR")
    return replace(observers, record=out / RECORD_FILE)


def _counterfactual(
    journal: Path,
    asked: dict[str, Any],
    observers: Observers,
    out: Path | None,
    *,
    steps: bool,
    perfetto: bool,
    with_page: bool,
) -> int:
    """Play a journal under what is asked for; replay it if that changes nothing. Return the exit code."""
    from lorrery.cli.journal import print_paired, replay_journal  # half as much again to import as a run
    from lorrery.simulator.counterfactual import AskedOf, prepare_counterfactual

    check_report(out, report=with_page)
    prepared = prepare_counterfactual(AskedOf(journal, **asked))
    if prepared.run is not None:
        return _run(prepared.run, out, observers, steps=steps, perfetto=perfetto, with_page=with_page, of=prepared)
    if steps or perfetto or observers != Observers():
        raise SettingsError(
            "--steps, --perfetto, --record and --metrics are of a simulation, and nothing is changed, so that the"
            " journal is replayed; leave them out"
        )
    console = table_console()
    code = replay_journal(journal, console)
    if out is not None and not code:
        result = prepared.unchanged()
        print_paired(result.differences, console)
        _show_written(result.write(out), console)
    return code


def _run(
    run: SimulatedRun,
    out: Path | None,
    observers: Observers,
    *,
    steps: bool,
    perfetto: bool,
    with_page: bool,
    of: "Prepared | None" = None,
) -> int:
    """Run the simulation and write the requested files; `of`: the journal whose traffic it plays."""
    observers = _recording(observers, out)
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
    result = None if of is None else of.result(report)
    if result is not None:
        report = result.simulated.report
    print_report(report, console, _bases(run))
    if result is not None:
        from lorrery.cli.journal import print_paired

        print_paired(result.differences, console)
    if out is not None:
        written = [*write_report(report, out), *written]
        if result is not None:
            written += result.write_beside(out)
        if with_page:
            # Imported after the run: it would only slow the start.
            from lorrery.view.reports.report import report as make_page

            folders = (out,) if result is None else (out / RECORDED_FOLDER, out)
            written.append(make_page(*folders, file=out / REPORT_FILE))
        _show_written(written, console)
    if observers.record is not None:
        shown = f"record    {observers.record} (lorrery web {observers.record})"
        console.print(shown, style="dim", highlight=False, soft_wrap=True)
    if observers.metrics is not None:
        console.print(f"metrics   {observers.metrics}", style="dim", highlight=False, soft_wrap=True)
    if result is not None:  # what clients had cut off live is no failure of this run
        return EXIT_INTERRUPTED if report.interrupted else EXIT_OK
    return report.exit_code


def _show_written(written: Iterable[Path], console: Console) -> None:
    for path in written:
        console.print(f"report    {path}", style="dim", highlight=False, soft_wrap=True)


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
    """Refuse what the journal says itself, as it would have no effect: settings file and workload; and sweeps."""
    workload = [name for name, option in OPTIONS.items() if not option.live_only]
    own = {"config", "sweeps", "serve", *workload, *options_of(Where)}
    given = [
        max(option.opts, key=len)
        for option in context.command.params
        if option.name in own
        and (source := context.get_parameter_source(option.name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        why = "--journal plays the requests that were recorded, under their settings and those of --set"
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
        _show_written(written, console)
    return EXIT_FAILURES if result.report.summary.num_failed else EXIT_OK
