"""`lorrery calibrate` of kernel rows: fits constants part by part; `worker/device/calibration/kernels.py`.

The constants are fitted on two shapes of three; the error on the other shapes is that of the constants as written.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import typer

from lorrery.service.errors import FormatError
from lorrery.service.files.writing import write_output
from lorrery.view.terminal import FigureTable, table_console
from lorrery.worker.device.calibration.catalogue_file import to_toml
from lorrery.worker.device.calibration.kernel_rows import KernelRow
from lorrery.worker.device.calibration.kernels import PartFit, calibrated, fit, parts_of, percent_errors
from lorrery.worker.device.catalogue.hardware import (
    KV_TYPES,
    WEIGHT_TYPES,
    CatalogueError,
    Gpu,
)
from lorrery.worker.device.catalogue.tables import Catalogue
from lorrery.worker.device.kernels import compute_type

WHAT_TELLS = {
    "flops": "many tokens (1,000 and more)",
    "bandwidth": "large weights and few tokens",
    "us": "small shapes, which take a few microseconds",
    "inner_ns": "few columns of many inner elements",
    "launch_us": "small shapes",
    "prefill_flops": "long prompts, or many",
    "prefill_us": "single short prompts",
    "store_bandwidth": "many short prompts with many KV heads",
    "tile_start": "many short prompts",
    "overlap": "few prompts and few heads",
    "decode_bandwidth": "decodes of many or long sequences",
    "decode_us": "decodes of few short sequences",
    "sequence_us": "decodes of many short sequences",
    "sequence_ns": "decodes of many short sequences",
    "longest_ns": "decodes of one long sequence",
    "us_per_gpu": "messages of 256 KiB and more over different numbers of GPUs",
    "large_us": "messages around 16 MiB",
    "gb_per_second": "large messages over that many GPUs",
    "expert_rows": "several tokens an expert",
    "expert_us": "many experts of few tokens",
    "activation_bandwidth": "many tokens, small experts",
    "all_pairs": "many tokens with experts dealt to groups of GPUs",
}
"""Constant -> the rows that would determine it."""
_SHARES = {
    "flops": "FLOPS",
    "prefill_flops": "FLOPS",
    "bandwidth": "memory bandwidth",
    "decode_bandwidth": "memory bandwidth",
}


def calibrate_kernels(file: Path, rows: Sequence[KernelRow], known: Catalogue, gpu: Gpu, out: Path | None) -> None:
    """Fit a GPU's constants, print them with their errors, and write them if asked.

    Args:
        file: the rows' file, for messages.
        rows: of any GPU.
        known: catalogue in which the rows' GPUs are looked up.
        gpu: the GPU to fit.
        out: the TOML file to write.

    Raises:
        FormatError: no row of this GPU to fit to.
    """
    own = [row for row in rows if not row.gpu or _is(known, row.gpu, gpu)]
    parts = parts_of(gpu, own)
    fits = [fit(part) for part in parts]
    if not any(one.errors for one in fits):
        raise FormatError(f"{file}: no rows of {gpu.name} to fit to, of {len(rows)}")
    num_rows = sum(len(part.rows) for part in parts)
    typer.echo(f"{num_rows:,} rows of {gpu.name}: constants from two shapes of three, errors also of the others")
    if others := len(own) - num_rows:
        typer.echo(f"left out {others:,} rows: of kernels that no constant is for")
    console = table_console()
    console.print(_constants(fits))
    console.print(_errors(fits))
    for line in [*_unknown(fits), *_missing(gpu, fits), *_doubts(fits)]:
        typer.echo(line)
    if out is not None:
        source = f"lorrery calibrate {file.name} --gpu {gpu.name}: {num_rows:,} rows of single kernels"
        write_output(out, to_toml(calibrated(gpu, fits, source), source, modern=True))
        typer.echo(f'wrote {out}; name it in the settings: catalogue = ["{out}"]')


def _is(known: Catalogue, name: str, gpu: Gpu) -> bool:
    if name == gpu.name:
        return True
    try:
        return known.gpu(name).name == gpu.name
    except CatalogueError:
        return False


def _constants(fits: Sequence[PartFit]) -> FigureTable:
    table = FigureTable()
    table.add_column("part", justify="left", wraps_at=12)
    table.add_column("constant", justify="left")
    for name in ("before", "fitted", "+- %"):
        table.add_column(name)
    for one in fits:
        part = one.part.name
        for name, value in one.values.items():
            error = f"{one.errors[name] * 100:.1f}" if name in one.errors else "kept" if name in one.kept else ""
            table.add_row(part, name, f"{one.part.start[name]:.4g}", f"{value:.4g}", error)
            part = ""
    return table


def _errors(fits: Sequence[PartFit]) -> FigureTable:
    """Return the errors by part and op, for the shapes fitted on and for the others."""
    table = FigureTable(first_to_go=("median % fitted",))
    table.add_column("part", justify="left", wraps_at=12)
    table.add_column("op", justify="left", wraps_at=12)
    for name in ("rows", "MAPE % before", "MAPE % fitted", "median % fitted"):
        table.add_column(name)
    for name in ("unseen rows", "MAPE % before, unseen", "MAPE % fitted, unseen"):
        table.add_column(name)
    for one in fits:
        rows = one.part.rows
        before, after = percent_errors(one.part, one.part.start), percent_errors(one.part, one.values)
        seen = np.array([row.is_fitted for row in rows])
        for op in sorted({row.op for row in rows}):
            of = np.array([row.op == op for row in rows])
            median = f"{np.median(after[of & seen]):+.1f}" if any(of & seen) else "-"
            table.add_row(
                one.part.name, op,
                f"{np.sum(of & seen):,}", _mape(before[of & seen]), _mape(after[of & seen]), median,
                f"{np.sum(of & ~seen):,}", _mape(before[of & ~seen]), _mape(after[of & ~seen]),
            )  # fmt: skip
    return table


def _mape(errors: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    return f"{np.mean(np.abs(errors)):.1f}" if len(errors) else "-"


def _unknown(fits: Sequence[PartFit]) -> list[str]:
    """Return which constants the rows do not determine, and which rows would."""
    return [
        f"not determined: {one.part.name} {name}, kept at {one.values[name]:.4g}; told by"
        f" {WHAT_TELLS.get(name.partition('.')[0], 'other shapes')}"
        for one in fits
        for name in one.kept
        if name.partition(".")[0] in WHAT_TELLS
    ]


def _missing(gpu: Gpu, fits: Sequence[PartFit]) -> list[str]:
    """Return a line that names the parts without any row."""
    names = [f"gemm.{name}" for name in WEIGHT_TYPES if name == compute_type(gpu, name)[1]]
    names += [f"attention.{name}" for name in KV_TYPES]
    names += [f"moe.{name}" for name in gpu.modern_fit.moe]
    names += ["lora", "lora_segmented", "all_reduce", "modern_all_reduce"]
    missing = [name for name in names if name not in {one.part.name for one in fits}]
    return [f"no rows: {', '.join([*missing, 'elementwise'])}; kept as they were"]


def _doubts(fits: Sequence[PartFit]) -> list[str]:
    return [
        f"warning: {doubt(f'{one.part.name} {name}', value, _SHARES[name], 'the times are microseconds of one kernel')}"
        for one in fits
        for name, value in one.values.items()
        if name in _SHARES and name in one.errors and value > 1
    ]


def doubt(name: str, value: float, what: str, unit: str) -> str:
    """Return a warning that a constant exceeds the data sheet.

    Args:
        name: the constant.
        value: its share of the data sheet's figure.
        what: the data sheet's figure.
        unit: how the times should have been measured.
    """
    return (
        f"{name} is {value:.2f}: faster than the data sheet's {what}; look whether the GPU's figures are those of the"
        f" measured one, whether {unit}, and whether the chip boosts"
    )
