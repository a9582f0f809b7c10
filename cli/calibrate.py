"""`lorrery calibrate`: fits a GPU's kernel constants to one's own profile of it, and writes them for the settings.

The fit is in `worker.device.calibration`. How far it can be trusted is told by fitting half of the rows and judging the
other half; what is written is fitted to all.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from lorrery.chassis.commands import Command, command_app
from lorrery.chassis.errors import FormatError, SettingsError
from lorrery.chassis.terminal import FigureTable
from lorrery.cli.output import write
from lorrery.cli.version import VersionOption
from lorrery.validation.steptime import UNTIMED, measured_deployment, modelled, read_file
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.calibration import Calibration, Measured, calibrate
from lorrery.worker.device.catalogue import DEFAULT_FIT, FORMAT, Catalogue
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.errors import CatalogueError
from lorrery.worker.device.hardware import AllReduce, Gpu, KernelFit
from lorrery.worker.device.profile import PHASES, ProfileRow
from lorrery.worker.device.roofline import Roofline

MOST_ROWS = 1000
"""Rows fitted at most, evenly chosen: more would take minutes and change no digit that counts."""

app = command_app()


@app.command("calibrate", cls=Command)
def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="CSV of measured steps.")],
    gpu: Annotated[str | None, typer.Option(help="GPU; default: the one that FILE names.")] = None,
    model: Annotated[str | None, typer.Option(help="Model of rows that name none.")] = None,
    version: VersionOption = False,
    tflops: Annotated[float | None, typer.Option(help="Of a GPU not in the catalogue: dense, 16 bits.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Of such a GPU.")] = None,
    gb_per_second: Annotated[float | None, typer.Option(help="Of such a GPU: memory bandwidth.")] = None,
    num_sms: Annotated[int | None, typer.Option(help="Of such a GPU: streaming multiprocessors.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="What the times hold; default: by the rows' source, else kernels alone.")
    ] = None,
    host: Annotated[bool, typer.Option("--host", help="The times hold the CPU's share: fit that too.")] = False,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write TOML for the settings' catalogue.")] = None,
    catalogue: Annotated[list[Path] | None, typer.Option(help="TOML with further GPUs, models; repeatable.")] = None,
) -> None:
    """Fit a GPU's kernel constants to your own profile of it.

    Prints the constants, and the error that they leave: beside the default constants', and on rows that the fit did
    not see. docs/step-time.md says what FILE holds. Name the file written with --out in the settings (`catalogue`).

    Examples:
      lorrery calibrate profile.csv --gpu A10G --out my-gpu.toml
      lorrery calibrate profile.csv --gpu MyGPU --tflops 200 --memory-gb 48 --gb-per-second 900 --num-sms 80
      lorrery simulate --set 'catalogue=["my-gpu.toml"]' --set worker.gpu=A10G
    """
    known = read_catalogue(catalogue or ())
    good = [row for row in read_file(file) if row.quality == "ok"]
    rows = [row for row in good if row.measured_ms is not None]
    name = _gpu_name(rows, gpu, file)
    target = _target(known, name, tflops, memory_gb, gb_per_second, num_sms)
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
        write(out, to_toml(target, whole, f"fitted to {len(measured)} rows of {file.name}"))
        typer.echo(f'wrote {out}; name it in the settings: catalogue = ["{out}"]')


def to_toml(gpu: Gpu, calibration: Calibration, source: str) -> str:
    """Write a fit, and the GPU with it, as a catalogue of one's own."""
    fit_name = "".join(letter if letter.isalnum() else "-" for letter in gpu.name.lower())
    lines = [f"format = {FORMAT}", "", f"[fits.{fit_name}]", f'source = "{source}"']
    lines += [f"{key} = {_figure(value)}" for key, value in calibration.fit.constants.items()]
    if calibration.host:
        lines += ["", f"[engines.{fit_name}-engine]", f'source = "{source}"']
        lines += [f"{key} = {_figure(value)}" for key, value in calibration.host.items()]
    lines += ["", "[[gpu]]", f'name = "{gpu.name}"', f'source = "{source}"', f'fit = "{fit_name}"']
    for key in ("tflops", "memory_gb", "gb_per_second", "num_sms", "pcie_gb_per_second", "fp8_tflops"):
        if (value := getattr(gpu, key)) is not None:
            lines.append(f"{key} = {_figure(value)}")
    tables: list[str] = []
    for key in ("all_reduce", "pair_all_reduce"):
        link: AllReduce | None = getattr(gpu, key)
        if link is not None:
            link_name = f"{fit_name}-{key}"
            lines.append(f'{key} = "{link_name}"')
            tables += ["", f"[links.{link_name}]", f'source = "of {gpu.name} before the fit"']
            tables += [f"us = {_figure(link.us)}", f"gb_per_second = {_figure(link.gb_per_second)}"]
    lines += tables
    return "\n".join(lines) + "\n"


_SHARES = {
    "gemm_flops": "FLOPS",
    "prefill_flops": "FLOPS",
    "gemm_bandwidth": "memory bandwidth",
    "decode_bandwidth": "memory bandwidth",
}
"""Constants that are shares of a data sheet's figure. Elementwise kernels are none: they may hit the L2 cache."""


def doubts(fit: KernelFit) -> list[str]:
    """Say which constants are above what the data sheet has."""
    return [
        f"{name} is {value:.2f}: faster than the data sheet's {what}; look whether the GPU's figures are those of the"
        " measured one, whether the times are milliseconds of whole steps, and whether the chip boosts"
        for name, what in _SHARES.items()
        if (value := fit.constants[name]) > 1
    ]


def _figure(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) and value < 1000 else f"{value:g}"


def _gpu_name(rows: Sequence[ProfileRow], asked: str | None, file: Path) -> str:
    names = sorted({row.gpu for row in rows if row.gpu})
    if asked is not None:
        return asked
    if len(names) != 1:
        what = f"rows of {', '.join(names)}" if names else "no gpu column"
        raise SettingsError(f"{file} has {what}: say which with --gpu")
    return names[0]


def _target(
    known: Catalogue,
    name: str,
    tflops: float | None,
    memory_gb: float | None,
    gb_per_second: float | None,
    num_sms: int | None,
) -> Gpu:
    if tflops is None and memory_gb is None and gb_per_second is None and num_sms is None:
        try:
            return known.gpu(name)
        except CatalogueError as error:
            raise SettingsError(
                f"{error}; give its data sheet with --tflops, --memory-gb, --gb-per-second, --num-sms"
            ) from None
    if tflops is None or memory_gb is None or gb_per_second is None or num_sms is None:
        raise SettingsError("--tflops, --memory-gb, --gb-per-second and --num-sms go together")
    like = known.gpu("A100-80-SXM")
    fit = known.fits[DEFAULT_FIT]
    return replace(
        like, name=name, tflops=tflops, memory_gb=memory_gb, gb_per_second=gb_per_second, num_sms=num_sms,
        fit=fit, fit_name=DEFAULT_FIT, modern_fit=fit, modern_fit_name=DEFAULT_FIT, modern_all_reduce=None,
        usable_memory_gb=None, fp8_tflops=None, all_reduce=known.gpu("A40").all_reduce,
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
    """Give each row its deployment, one object for all rows of a group."""
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
