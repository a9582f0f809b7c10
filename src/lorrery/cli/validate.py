"""`lorrery validate`: compares the shipped code with other programs and with measurements of GPUs.

Without a command it runs every check of the shipped figures (`validation/overview.py`).
`golden` replays golden records (`validate_golden.py`), `steptime` compares the step-time models with measured steps,
`kernels` their kernels one by one, `serving` whole runs of served models, `lora` runs with adapters, `vidur` the
simulator with a run of Vidur.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from lorrery.cli.flags import VersionOption
from lorrery.cli.validate_golden import golden
from lorrery.cli.validate_rows import kernels, lora, serving
from lorrery.service.commands import Command, command_app
from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import read_tables
from lorrery.service.files.writing import check_writable, write_output
from lorrery.service.settings.cluster import load
from lorrery.validation import overview
from lorrery.validation import slora as slora_runs
from lorrery.validation import steptime as steptimes
from lorrery.validation import vidur as vidur_run
from lorrery.validation.figures import MEASURED_STEPS, SLORA_RUNS, VIDUR_REQUESTS, VIDUR_STEPS
from lorrery.validation.policy.check import check_policy, placements_of
from lorrery.validation.policy.placement import check_placement
from lorrery.validation.serving import default_jobs
from lorrery.validation.vidur import BatchRules
from lorrery.view.terminal import table_console
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.catalogue.tables import PACKAGE, Catalogue
from lorrery.worker.device.steptime import STEP_TIME_MODELS

_PARTS = {"policy": (), "batching": ("scheduler.policy=fcfs",), "placement": ()}
"""Part that `validate policy` checks, named like its setting -> settings it runs with unless --set overrides them."""

app = command_app(
    "Check the shipped code against the programs and GPUs that it models; without a command, run every check, in half"
    " a minute."
)
app.command(cls=Command)(golden)
app.command(cls=Command)(kernels)
app.command(cls=Command)(serving)
app.command(cls=Command)(lora)


@app.callback(invoke_without_command=True)
def validate(context: typer.Context, version: VersionOption = False) -> None:
    """Run every check against the shipped data: prints the number of cases of each kind, and the model's errors.

    Exits with 1 if a decision differs from the original program's, or if Vidur's run is off by more than 3 %.
    """
    del version
    if context.invoked_subcommand is not None:
        return
    checks = overview.checks(jobs=default_jobs())
    shown = track(checks.values(), "checking", console=Console(stderr=True), transient=True)
    lines = [line for check in shown for line in check()]
    table_console().print(overview.render(lines))
    typer.echo("error: the mean absolute one, S-LoRA's the median; `lorrery validate COMMAND` has the particulars")
    if not all(line.ok for line in lines):
        raise typer.Exit(1)


@app.command(cls=Command)
def policy(
    name: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="Your own class, or a shipped one by its name.")],
    part: Annotated[
        str,
        typer.Option(
            metavar="PART", help=f"Kind of class: {', '.join(_PARTS)}; policy is a queue of scheduler.policy."
        ),
    ] = "policy",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set one setting, such as scheduler.policy_options.ageing=0.5 or scheduler.batching=chunked;"
            " repeatable.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to search for a fault.")] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws; the same seed draws the same cases.")] = 0,
) -> None:
    """Check that your own policy, batching or placement keeps its contract.

    Checks its interface first. A queue or batching then runs small replicas under random orders of arrivals,
    cancellations, steps and worker losses; each case runs again with a decision before every step, and with decisions
    only when it asked for them, which must give the same result. A placement chooses among workers that join, leave,
    fill and empty, twice, with the same result. Prints the first fault with a case that shows it, and exits with 1.

    Examples:
      lorrery validate policy vtc_fair --seconds 5
      lorrery validate policy my_module:MyQueue --set scheduler.policy_options.ageing=0.5
      lorrery validate policy my_module:MyBatching --part batching --set scheduler.policy=fcfs
      lorrery validate policy predicted_finish --part placement --seconds 5
    """
    if part not in _PARTS:
        raise SettingsError(f"--part {part}: it must be one of {', '.join(_PARTS)}")
    settings = load(overrides=[*_PARTS[part], f"scheduler.{part}={name}", *(overrides or ())])
    typer.echo(f"{name}: trying it for {seconds:g} s, seed {seed}")
    if part == "placement":
        placed = check_placement(placements_of(settings), seed=seed, seconds=seconds)
        typer.echo(f"{name}: {placed.fault}" if placed.fault else f"{name}: {placed.num_cases} cases, no fault")
        if placed.fault:
            typer.echo(f"  {placed.case}")
            raise typer.Exit(1)
        return
    verdict = check_policy(settings, seed=seed, seconds=seconds)
    if verdict.case is not None:
        typer.echo(f"{name}: {verdict.fault}")
        typer.echo(f"  {verdict.case.title}, seed {seed}")
        raise typer.Exit(1)
    typer.echo(f"{name}: {verdict.num_cases} cases, no fault")
    if verdict.every_step:
        typer.echo("  it does not say how long an answer holds, so it is asked before every step: right, and slower")


@app.command(cls=Command)
def steptime(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="CSV of measured steps; default: the shipped published ones.",
        ),
    ] = MEASURED_STEPS,
    step_time: Annotated[
        str, typer.Option("--step-time", metavar="NAME", help=f"One of {', '.join(STEP_TIME_MODELS)}.")
    ] = "roofline",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write the errors to this file.")
    ] = None,
    catalogue: Annotated[
        list[Path] | None, typer.Option(help="TOML file with additional GPUs, models, engines; repeatable.")
    ] = None,
    all_qualities: Annotated[bool, typer.Option("--all", help="Include rows whose quality is not ok.")] = False,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="GPU for rows that name none.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model for rows that name none.")] = None,
) -> None:
    """Compare a step-time model with measured steps.

    Prints the mean absolute percentage error (MAPE) and the 95th percentile of the error per source, GPU, model and
    phase. docs/step-time.md describes FILE. Exits with 1 if no row could be compared.

    Examples:
      lorrery validate steptime
      lorrery validate steptime my-profile.csv --gpu H100-SXM --model Llama-3-8B
    """
    if step_time not in STEP_TIME_MODELS:
        raise SettingsError(f"--step-time {step_time}: no such model; there are {', '.join(STEP_TIME_MODELS)}")
    try:
        known = Catalogue(read_tables(PACKAGE, catalogue or ()))
    except CatalogueError as error:
        raise SettingsError(str(error)) from None
    if json_file is not None:
        check_writable("--json", json_file)
    rows = steptimes.name_rows(steptimes.read_file(file), gpu, model)
    comparison = steptimes.compare(rows, known, step_time, all_qualities=all_qualities)
    Console(soft_wrap=True, highlight=False).print(steptimes.render(comparison))
    for reason, num_rows in comparison.left_out.items():
        typer.echo(f"left out {num_rows} rows: {reason}")
    if json_file is not None:
        write_output(json_file, steptimes.to_json(comparison))
    if not comparison.rows:
        raise typer.Exit(1)


@app.command(cls=Command)
def vidur(
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="REQUESTS",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="CSV with a row per request; default: the shipped run's.",
        ),
    ] = VIDUR_REQUESTS,
    steps: Annotated[
        Path | None,
        typer.Argument(
            metavar="STEPS", exists=True, dir_okay=False, show_default=False, help="CSV with a row per engine step."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum padded tokens in a prefill (max_tokens_in_batch).")
    ] = BatchRules().max_tokens,
    max_sequences: Annotated[
        int, typer.Option(min=1, help="Maximum sequences in a batch (batch_size_cap).")
    ] = BatchRules().max_sequences,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = BatchRules().block_size,
    num_blocks: Annotated[int, typer.Option(min=1, help="KV blocks.")] = BatchRules().num_blocks,
    watermark: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of the blocks that admission leaves free.")
    ] = BatchRules().watermark,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write the figures to this file.")
    ] = None,
) -> None:
    """Replay a run of Vidur's vLLM-style scheduler, and compare the requests' times.

    Fits step times to STEPS (model "fitted" of docs/step-time.md), runs REQUESTS through the simulator with Vidur's
    batch rules, and prints p50, p90 and p99 of the wait in the queue, TTFT, TPOT and E2E beside the recorded ones.
    Exits with 1 if one is more than 3 % off at p50 or p99.

    Examples:
      lorrery validate vidur
      lorrery validate vidur requests.csv steps.csv --max-sequences 64
    """
    if steps is None:
        if requests != VIDUR_REQUESTS:
            raise SettingsError(f"{requests}: give the run's log of steps after it, REQUESTS STEPS")
        steps = VIDUR_STEPS
    if json_file is not None:
        check_writable("--json", json_file)
    rules = BatchRules(max_tokens, max_sequences, block_size, num_blocks, watermark)
    comparison = vidur_run.compare(requests, steps, rules)
    Console(soft_wrap=True, highlight=False).print(vidur_run.render(comparison))
    for line in vidur_run.summary(comparison):
        typer.echo(line)
    if json_file is not None:
        write_output(json_file, vidur_run.to_json(comparison))
    if not comparison.within:
        raise typer.Exit(1)


@app.command(cls=Command)
def slora(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="CSV of published runs; default: the shipped ones, which take about half a minute.",
        ),
    ] = SLORA_RUNS,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="NAME", help=f"Only this policy, one of {', '.join(slora_runs.POLICIES)}; repeatable."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write the errors to this file.")
    ] = None,
) -> None:
    """Replay S-LoRA's published runs, and compare throughput, latency and first-token time with them.

    Runs each row's workload through the core in the policy's strict mode, on the row's GPU with S-LoRA's engine,
    under the virtual clock. Prints predicted / measured and the relative error per row, and the median and 90th
    percentile of the error per GPU and policy. Rows that are not modelled are counted by reason. docs/validation.md
    says how the engine was calibrated, and which errors remain. Exits with 1 if no row could be replayed.

    Examples:
      lorrery validate slora runs.csv --policy req_queue
    """
    if unknown := set(policies or ()) - slora_runs.POLICIES.keys():
        known = ", ".join(slora_runs.POLICIES)
        raise SettingsError(f"--policy {', '.join(sorted(unknown))}: not modelled; there are {known}")
    if json_file is not None:
        check_writable("--json", json_file)
    rows, others = slora_runs.read_rows(file)
    chosen = [row for row in rows if not policies or row.policy in policies]
    catalogue = Catalogue(read_tables(PACKAGE))
    shown = track(chosen, "replaying", console=Console(stderr=True), transient=True)
    found = [slora_runs.predict(row, catalogue) for row in shown]
    for line in slora_runs.render_rows(found):
        typer.echo(line)
    for one in found:
        if (why := slora_runs.why_off(one)) is not None:
            typer.echo(f"off: {one.row.experiment}, line {one.row.source_line}: {why}")
    Console(soft_wrap=True, highlight=False).print(slora_runs.render_groups(found))
    for reason, number in Counter(other.why for other in others).most_common():
        typer.echo(f"not modelled: {number} rows: {reason}")
    if json_file is not None:
        write_output(json_file, json.dumps(slora_runs.to_json(found, others), indent=1) + "\n")
    if not found:
        raise typer.Exit(1)
