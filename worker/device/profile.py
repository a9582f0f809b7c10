"""Measured steps: one row per batch, as profilers write them.

Columns (others are ignored, empty cells mean not measured): `phase`; `batch_size`, `kv_len` for decodes;
`prefill_chunk`, `prefill_kv_prefix` for prefills; `num_tokens` for the linear part; the time in milliseconds of the
whole step, `measured_step_ms` or `step_ms`, of its linear part, `measured_linear_ms`, and of its attention, `attn_ms`.
Of use where the file holds more than one profile: `gpu`, `model`, `tp`, `source`, `quality`, `num_layers`.

Phases: `decode`: each of `batch_size` sequences adds one token at context `kv_len`; `prefill`: `batch_size` sequences
(1 if empty) of `prefill_chunk` new tokens after `prefill_kv_prefix` cached ones; `mixed`: one such chunk and
`batch_size` - 1 decodes; `linear`: everything of a step of `num_tokens` tokens but attention.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lorrery.vocabulary.files import repeated
from lorrery.worker.device.batch import Batch, PrefillChunk

PHASES = ("linear", "decode", "prefill", "mixed")


class ProfileError(ValueError):
    """An invalid row; the message names the line."""


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One measured step.

    Attributes:
        source: of the measurement.
        gpu: as spelled in the file.
        model: as spelled in the file.
        tensor_parallel: degree.
        phase: one of `PHASES`.
        quality: "ok" if not given.
        num_layers: of the profiled model, if given.
        num_tokens: computed in the step.
        batch_size: sequences; for `mixed` the prefill counts as one.
        kv_len: tokens in the cache of each decode.
        prefill_chunk: new prompt tokens.
        prefill_prefix: cached tokens before them.
        step_ms: the whole step.
        linear_ms: without attention, all-reduce, head.
        attention_ms: attention alone.
    """

    source: str
    gpu: str
    model: str
    tensor_parallel: int
    phase: str
    quality: str
    num_layers: int | None
    num_tokens: int
    batch_size: int
    kv_len: int
    prefill_chunk: int
    prefill_prefix: int
    step_ms: float | None
    linear_ms: float | None
    attention_ms: float | None

    @property
    def measured_ms(self) -> float | None:
        """The measured time of the phase."""
        return self.linear_ms if self.phase == "linear" else self.step_ms

    def batch(self) -> Batch:
        """Return the step's work."""
        chunk = PrefillChunk(self.prefill_chunk, self.prefill_prefix, samples=True)
        match self.phase:
            case "prefill":
                return Batch((chunk,) * self.batch_size)
            case "decode":
                return Batch((), self.batch_size, self.batch_size * self.kv_len, self.kv_len)
            case _:
                num_decodes = self.batch_size - 1
                return Batch((chunk,), num_decodes, num_decodes * self.kv_len, self.kv_len)


_NEEDED = {
    "decode": ("batch_size", "kv_len"),
    "prefill": ("prefill_chunk",),
    "mixed": ("batch_size", "kv_len", "prefill_chunk"),
    "linear": ("num_tokens",),
}
"""Phase -> columns without a default."""


def read_profile(lines: Iterable[str]) -> list[ProfileRow]:
    """Read the rows of a CSV file with a header. `measured_ms` is None if the file does not have the phase's time.

    Raises:
        ProfileError: an unsuitable header, or an invalid row; the message names the line.
    """
    reader = csv.DictReader(lines)
    columns = set(reader.fieldnames or ())
    if "phase" not in columns or not columns & {"step_ms", "measured_step_ms", "measured_linear_ms"}:
        raise ProfileError("line 1: no header with phase and measured_step_ms (or step_ms, or measured_linear_ms)")
    if twice := repeated(reader.fieldnames or ()):
        raise ProfileError(f"line 1: column {twice} is there twice; keep one")
    rows: list[ProfileRow] = []
    for cells in reader:
        try:
            _check_length(cells, reader.fieldnames or ())
            rows.append(_read_row(cells))
        except ValueError as error:
            raise ProfileError(f"line {reader.line_num}: {error}") from None
    return rows


def _check_length(cells: Mapping[str | None, object], columns: Sequence[str]) -> None:
    num_missing = sum(cells[column] is None for column in columns)
    if num_missing:
        raise ValueError(
            f"{len(columns) - num_missing} cells for the {len(columns)} columns of the header; leave a cell empty where"
            " nothing was measured"
        )
    if None in cells:
        raise ValueError(f"more cells than the {len(columns)} columns of the header")


def _read_row(cells: Mapping[str, str | None]) -> ProfileRow:
    phase = (cells["phase"] or "").strip()
    if phase not in PHASES:
        raise ValueError(f"phase {phase!r} is not known; known: {', '.join(PHASES)}")
    for column in _NEEDED[phase]:
        if _count(cells, column) is None:
            where = "is empty" if column in cells else "is not in the header"
            raise ValueError(f"phase {phase} needs {column}, which {where}")
        if column != "kv_len" and not _count(cells, column):
            raise ValueError(f"{column} is 0; phase {phase} needs at least 1")
    step_ms = _milliseconds(cells, "measured_step_ms")
    return ProfileRow(
        source=cells.get("source") or "",
        gpu=cells.get("gpu") or "",
        model=cells.get("model") or "",
        tensor_parallel=_count(cells, "tp") or 1,
        phase=phase,
        quality=cells.get("quality") or "ok",
        num_layers=_count(cells, "num_layers"),
        num_tokens=_count(cells, "num_tokens") or 0,
        batch_size=_count(cells, "batch_size") or 1,
        kv_len=_count(cells, "kv_len") or 0,
        prefill_chunk=_count(cells, "prefill_chunk") or 0,
        prefill_prefix=_count(cells, "prefill_kv_prefix") or 0,
        step_ms=step_ms if step_ms is not None else _milliseconds(cells, "step_ms"),
        linear_ms=_milliseconds(cells, "measured_linear_ms"),
        attention_ms=_milliseconds(cells, "attn_ms"),
    )


def _count(cells: Mapping[str, str | None], column: str) -> int | None:
    value = _number(cells, column)
    if value is None:
        return None
    if value < 0 or not value.is_integer():
        raise ValueError(f"{column} is {cells[column]!r}; it must be a whole number")
    return int(value)


def _milliseconds(cells: Mapping[str, str | None], column: str) -> float | None:
    value = _number(cells, column)
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{column} is {cells[column]!r}; it must be a number, more than 0")
    return value


def _number(cells: Mapping[str, str | None], column: str) -> float | None:
    """Return a cell's number; None if it is empty, NaN if it is not a number."""
    text = (cells.get(column) or "").strip()
    try:
        return float(text) if text else None
    except ValueError:
        return math.nan
