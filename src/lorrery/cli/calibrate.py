"""`lorrery calibrate`: fits a GPU's kernel constants to a user's profile of it, and writes them for the settings.

A profile is of single kernels (`calibrate_kernels`) or of whole steps. The fit to steps is in
`worker.device.calibration.steps`. Its error is estimated by fitting half of the rows and predicting the other half; the
constants written are fitted to all rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from lorrery.cli.calibrate_kernels import calibrate_kernels, doubt
from lorrery.cli.calibrate_runs import calibrate_runs
from lorrery.cli.flags import VersionOption
from lorrery.service.commands import Command, command_app
from lorrery.service.errors import FormatError, SettingsError
from lorrery.service.files.writing import check_writable, write_output
from lorrery.validation import kernels
from lorrery.validation.benchmark_output import Asked, holds_benchmarks
from lorrery.validation.serving_run import Options
from lorrery.validation.steptime import UNTIMED, measured_deployment, modelled, read_file
from lorrery.view.terminal import FigureTable
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.calibration.catalogue_file import to_toml
from lorrery.worker.device.calibration.steps import Calibration, Measured, calibrate
from lorrery.worker.device.catalogue.hardware import CatalogueError, Gpu, KernelFit
from lorrery.worker.device.catalogue.tables import DEFAULT_FIT, DEFAULT_MODERN_FIT, Catalogue
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.profile import PHASES, ProfileRow
from lorrery.worker.device.roofline import Roofline

MOST_ROWS = 1000
"""Most rows that are fitted, evenly spaced: more would take minutes and change no significant digit."""

app = command_app()


@app.command("calibrate", cls=Command)
def command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="CSV of measured kernels or steps; or results of a benchmark: pasted text, or JSON.",
        ),
    ],
    gpu: Annotated[str | None, typer.Option(help="GPU; default: the one named in FILE.")] = None,
    model: Annotated[str | None, typer.Option(help="Model for rows or runs that name none.")] = None,
    version: VersionOption = False,
    tflops: Annotated[float | None, typer.Option(help="For a GPU not in the catalogue: dense 16-bit TFLOPS.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="For such a GPU: memory size.")] = None,
    gb_per_second: Annotated[float | None, typer.Option(help="For such a GPU: memory bandwidth.")] = None,
    num_sms: Annotated[int | None, typer.Option(help="For such a GPU: streaming multiprocessors.")] = None,
    fp8_tflops: Annotated[
        float | None, typer.Option(help="For such a GPU, if it has 8-bit arithmetic: dense TFLOPS.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="What the times include; default: from the rows' source, else kernels alone. Of a benchmark: the"
            " preset, such as vllm-0.24; default: as its results say, in the newest version."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Of a benchmark: a setting of the server, which its results do not say."
        ),
    ] = None,
    host: Annotated[bool, typer.Option("--host", help="The times include the CPU's share: fit that too.")] = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a TOML file for the settings' catalogue.")
    ] = None,
    catalogue: Annotated[
        list[Path] | None, typer.Option(help="TOML file with additional GPUs, models; repeatable.")
    ] = None,
) -> None:
    """Fit a GPU's constants to your own measurements of it.

    FILE holds timings of single kernels (docs/validation.md) or of whole steps (docs/step-time.md); its header tells
    which. Or it holds results of a benchmark (docs/step-time.md): blocks that vLLM's or SGLang's printed, with the
    commands if you like, or the JSON of these, aiperf or guidellm; five runs with different loads tell the GPU's
    arithmetic and bandwidth, and the host's time of a step.

    Prints the constants and their remaining error, next to the error of the previous constants and on rows held out
    from the fit, and which constants the rows do not determine. List the file written with --out under `catalogue` in
    the settings.

    Examples:
      lorrery calibrate kernels.csv --gpu H100-SXM --out my-gpu.toml
      lorrery calibrate profile.csv --gpu A10G --out my-gpu.toml
      lorrery calibrate pasted.txt --gpu A10G --model Llama-3.1-8B --engine vllm-0.24 --out my-gpu.toml
      lorrery calibrate profile.csv --gpu MyGPU --tflops 200 --memory-gb 48 --gb-per-second 900 --num-sms 80
      lorrery simulate --set 'catalogue=["my-gpu.toml"]' --set worker.gpu=A10G
    """
    if out is not None:
        check_writable("--out", out)
    known = read_catalogue(catalogue or ())
    sheet = _Sheet(tflops, memory_gb, gb_per_second, num_sms, fp8_tflops)
    if holds_benchmarks(file):
        if gpu is None or host:
            raise SettingsError(f"{file} holds benchmark results: say on which GPU with --gpu; --host is for steps")
        flags = {} if model is None else {"model": model}
        options = Options(tuple(path.absolute() for path in catalogue or ()), overrides=tuple(overrides or ()))
        calibrate_runs(file, Asked(engine or "", flags), known, _target(known, gpu, sheet), options, out)
        return
    if overrides:
        raise SettingsError(f"{file} holds no benchmark results, for whose server --set is")
    if kernels.holds_kernels(file):
        if model is not None or engine is not None or host:
            raise SettingsError(f"{file} holds single kernels: --model, --engine and --host are for steps")
        timed = kernels.read_file(file).rows
        target = _target(known, _gpu_name([row.gpu for row in timed], gpu, file), sheet)
        calibrate_kernels(file, timed, known, target, out)
        return
    good = [row for row in read_file(file) if row.quality == "ok"]
    rows = [row for row in good if row.measured_ms is not None]
    name = _gpu_name([row.gpu for row in rows], gpu, file)
    target = _target(known, name, sheet)
    measured = _measured(rows, known, target, name, model, engine, file)
    if untimed := len(good) - len(rows):
        typer.echo(f"left out {untimed} rows: {UNTIMED}")
    if len(measured) < 2:
        raise FormatError(f"{file}: {len(measured)} rows of {name} to fit to; at least 2 are needed")
    step = -(-len(measured) // MOST_ROWS)
    measured = measured[::step]
    start = known.fits[DEFAULT_FIT]
    typer.echo(f"fitting {len(measured)} rows of {target.name}")
    half = calibrate(measured[::2], start, host=host)
    whole = calibrate(measured, start, host=host)

    console = Console(soft_wrap=True, highlight=False)
    console.print(_constants(start, whole))
    console.print(_errors(measured, Calibration(start, {}), half, whole))
    for line in doubts(whole.fit):
        typer.echo(f"warning: {line}")
    if out is not None:
        source = f"fitted to {len(measured)} rows of {file.name}"
        write_output(out, to_toml(target.with_fit(whole.fit), source, modern=False, host=whole.host))
        typer.echo(f'wrote {out}; name it in the settings: catalogue = ["{out}"]')


_SHARES = {
    "gemm_flops": "FLOPS",
    "prefill_flops": "FLOPS",
    "gemm_bandwidth": "memory bandwidth",
    "decode_bandwidth": "memory bandwidth",
}
"""Constants that are shares of a data sheet figure. Elementwise bandwidth is not one: the L2 cache may raise it."""


def doubts(fit: KernelFit) -> list[str]:
    """Return a warning for each constant that exceeds the data sheet."""
    return [
        doubt(name, value, what, "the times are milliseconds of whole steps")
        for name, what in _SHARES.items()
        if (value := fit.constants[name]) > 1
    ]


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Command-line figures for a GPU that is not in the catalogue."""

    tflops: float | None
    memory_gb: float | None
    gb_per_second: float | None
    num_sms: int | None
    fp8_tflops: float | None


def _gpu_name(of_rows: Iterable[str], asked: str | None, file: Path) -> str:
    names = sorted({name for name in of_rows if name})
    if asked is not None:
        return asked
    if len(names) != 1:
        what = f"rows of {', '.join(names)}" if names else "no gpu column"
        raise SettingsError(f"{file} has {what}: say which with --gpu")
    return names[0]


def _target(known: Catalogue, name: str, sheet: _Sheet) -> Gpu:
    if sheet == _Sheet(None, None, None, None, None):
        try:
            return known.gpu(name)
        except CatalogueError as error:
            raise SettingsError(
                f"{error}; give its data sheet with --tflops, --memory-gb, --gb-per-second, --num-sms"
            ) from None
    tflops, memory_gb, gb_per_second, num_sms = sheet.tflops, sheet.memory_gb, sheet.gb_per_second, sheet.num_sms
    if tflops is None or memory_gb is None or gb_per_second is None or num_sms is None:
        raise SettingsError("--tflops, --memory-gb, --gb-per-second and --num-sms go together")
    for option, value in zip(fields(_Sheet), astuple(sheet), strict=True):
        if value is not None and not (value > 0 and isfinite(value)):
            raise SettingsError(f"--{option.name.replace('_', '-')} {value:g}: must be above 0")
    return replace(
        known.gpu("A100-80-SXM"), name=name, tflops=tflops, memory_gb=memory_gb, gb_per_second=gb_per_second,
        num_sms=num_sms, fit=known.fits[DEFAULT_FIT], fit_name=DEFAULT_FIT,
        modern_fit=known.fits[DEFAULT_MODERN_FIT], modern_fit_name=DEFAULT_MODERN_FIT, modern_all_reduce=None,
        usable_memory_gb=None, fp8_tflops=sheet.fp8_tflops, fp4_tflops=None, all_reduce=known.gpu("A40").all_reduce,
    )  # fmt: skip


def _measured(
    rows: Sequence[ProfileRow],
    known: Catalogue,
    target: Gpu,
    gpu_name: str,
    model: str | None,
    engine: str | None,
    file: Path,
) -> list[Measured]:
    """Return each row with its deployment, one object for all rows of a group."""
    deployments: dict[tuple[str, str, int, int | None], Deployment] = {}
    found: list[Measured] = []
    for row in rows:
        if row.gpu and row.gpu != gpu_name and not _same(known, row.gpu, target):
            continue
        named = replace(row, gpu=row.gpu or target.name, model=row.model or model or "")
        if not named.model:
            raise SettingsError(f"{file} has rows that name no model: say which with --model")
        key = named.source, named.model, named.tensor_parallel, named.num_layers
        if key not in deployments:
            try:
                deployments[key] = measured_deployment(named, known, target, engine)
            except CatalogueError as error:
                raise SettingsError(str(error)) from None
        found.append(Measured(named, deployments[key]))
    return found


def _same(known: Catalogue, name: str, target: Gpu) -> bool:
    try:
        return known.gpu(name).name == target.name
    except CatalogueError:
        return False


def _constants(start: KernelFit, fitted: Calibration) -> FigureTable:
    table = FigureTable()
    table.add_column("constant", justify="left")
    for name in ("default", "fitted"):
        table.add_column(name)
    for key, value in fitted.fit.constants.items():
        table.add_row(key, f"{start.constants[key]:.4g}", f"{value:.4g}")
    for key, value in fitted.host.items():
        table.add_row(key, "", f"{value:.4g}")
    return table


def _errors(rows: Sequence[Measured], default: Calibration, half: Calibration, whole: Calibration) -> FigureTable:
    table = FigureTable()
    table.add_column("phase", justify="left")
    for name in ("rows", "default MAPE %", "fitted MAPE %", "p95 %", "unseen rows MAPE %"):
        table.add_column(name)
    all_errors = [_percent(rows, c) for c in (default, half, whole)]
    for phase in PHASES:
        chosen = [index for index, measured in enumerate(rows) if measured.row.phase == phase]
        if not chosen:
            continue
        before, halved, after = (errors[chosen] for errors in all_errors)
        unseen = [error for index, error in zip(chosen, halved, strict=True) if index % 2]
        shown = f"{np.mean(unseen):.2f}" if unseen else "-"
        table.add_row(
            phase, str(len(chosen)), f"{before.mean():.2f}", f"{after.mean():.2f}",
            f"{np.percentile(after, 95):.2f}", shown,
        )  # fmt: skip
    return table


def _percent(rows: Sequence[Measured], constants: Calibration) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    models: dict[int, Roofline] = {}
    errors: list[float] = []
    for measured in rows:
        key = id(measured.deployment)
        if key not in models:
            models[key] = Roofline(constants.apply(measured.deployment))
        modelled_ms, measured_ms = modelled(models[key], measured.row), measured.row.measured_ms
        assert modelled_ms is not None
        assert measured_ms is not None
        errors.append(abs(modelled_ms / measured_ms - 1) * 100)
    return np.array(errors)
