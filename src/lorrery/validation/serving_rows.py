"""Reads measured runs of served models: a CSV file with one row per run, described in docs/validation.md."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorrery.service.errors import FormatError
from lorrery.service.files.reading import open_csv
from lorrery.vocabulary.files import repeated

OK = "ok"
"""`quality` of a row that counts."""
DOUBTFUL = "suspect"
"""Prefix of the qualities of rows whose measurement is in doubt."""
MEASURED = ("ttft_ms", "tpot_ms")
_NEEDED = (
    "backend",
    "model",
    "gpu",
    "weight_dtype",
    "tensor_parallel",
    "concurrency",
    "input_tokens",
    "output_tokens",
    *MEASURED,
)
_COUNTS = (
    "tensor_parallel", "moe_tp", "moe_ep", "concurrency", "input_tokens", "output_tokens", "requests_per_client",
    "stream_interval", "max_num_seqs", "adapters", "adapter_rank", "max_loras",
)  # fmt: skip
_NUMBERS = ("length_ratio", *MEASURED)
ADAPTER_PROJECTIONS = ("qkvo", "all-linear")
_MOST_CLIENTS, _MOST_TOKENS, _MOST_REQUESTS, _MOST_ADAPTERS, _MOST_RANK = 100_000, 10_000_000, 1_000_000, 4096, 1024


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One run: clients that each send the next request when the last one is answered.

    Attributes:
        line: in the file.
        cells: the columns unchanged.
        fp8_scaling: of 8-bit weights: `tensor` or `block`.
        kv_dtype: of the KV cache; empty: unknown.
        moe_ep: GPUs over which experts are spread; 1: every expert is cut over all.
        length_ratio: shortest length as a share of the longest; None: unknown.
        requests_per_client: None: unknown.
        stream_interval: tokens in a message.
        max_num_seqs: of the server; None: as the source started it.
        adapters: LoRA adapters that requests name, each as often as the others; 0: the base model.
        adapter_rank: of each of them.
        adapter_projections: that each of them modifies.
        max_loras: of the server; None: the engine's default.
        measured: milliseconds by name; each a mean over requests. A TTFT that does not count may be missing.
    """

    line: int
    cells: Mapping[str, str]
    backend: str
    version: str
    model: str
    gpu: str
    weight_dtype: str
    fp8_scaling: str
    kv_dtype: str
    tensor_parallel: int
    moe_ep: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    length_ratio: float | None
    requests_per_client: int | None
    stream_interval: int
    max_num_seqs: int | None
    adapters: int
    adapter_rank: int
    adapter_projections: str
    max_loras: int | None
    quality: str
    ttft_quality: str
    measured: Mapping[str, float]

    @property
    def counts(self) -> bool:
        """Whether it is in the overall figures."""
        return self.quality == OK

    @property
    def ttft_counts(self) -> bool:
        """Whether its TTFT counts."""
        return self.ttft_quality == OK


@dataclass(frozen=True, slots=True)
class ServingFile:
    """Rows, and the columns of their cells."""

    columns: Sequence[str]
    rows: Sequence[ServingRow]


def read_file(path: Path) -> ServingFile:
    """Read a CSV file of runs.

    Raises:
        FormatError: an unreadable file, a missing column, or an invalid cell; names line and column.
    """
    with open_csv(path, FormatError, FormatError) as file:
        reader = csv.DictReader(file, restval="", strict=True)
        columns = list(reader.fieldnames or ())
        _check_columns(columns)
        rows = [_row(Cells(reader.line_num, cells)) for cells in reader]
    if not rows:
        raise FormatError(f"{path}: a header and no rows")
    return ServingFile(columns, rows)


def _check_columns(columns: Sequence[str]) -> None:
    if missing := [name for name in _NEEDED if name not in columns]:
        raise FormatError(
            f"line 1: no column {', '.join(missing)}; validate serving reads runs as docs/validation.md describes them"
        )
    if twice := repeated(columns):
        raise FormatError(f"line 1: column {twice} is there twice; keep one")


class Cells:
    """A line of a file; converting a cell to a type that it does not have raises `FormatError`.

    Attributes:
        line: its number.
        texts: its cells by column.
    """

    def __init__(self, line: int, cells: Mapping[str | None, object]) -> None:
        if None in cells:
            raise FormatError(f"line {line}: more cells than the header has; look for a comma in a value")
        self.line = line
        self.texts = {str(name): str(text) for name, text in cells.items()}

    def text(self, column: str, default: str = "") -> str:
        """Return the cell without blanks around it; the default if it is empty or missing."""
        return self.texts.get(column, "").strip() or default

    def name(self, column: str) -> str:
        """Return a cell that must not be empty."""
        if not (text := self.text(column)):
            raise FormatError(f"line {self.line}: {column} is empty; it must be a name")
        return text

    def number(self, column: str, most: float = math.inf) -> float:
        """Return a finite number above 0."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value < math.inf and value <= most):
            limit = "a number above 0" if most == math.inf else f"above 0 and at most {most:,g}"
            raise FormatError(f"line {self.line}: {column} is {text!r}; it must be {limit}")
        return value

    def count(self, column: str, most: int) -> int:
        """Return a whole number, 1 or more."""
        value = self.number(column, most)
        if value != int(value):
            raise FormatError(f"line {self.line}: {column} is {self.text(column)!r}; it must be a whole number")
        return int(value)

    def count_or(self, column: str, most: int, default: int) -> int:
        """Return a whole number; the default if the cell is empty or 0, for what does not apply."""
        return default if self.text(column) in ("", "0") else self.count(column, most)

    def any_count(self, column: str, most: int) -> int | None:
        """Return a whole number, 1 or more; None if the cell is empty."""
        return self.count(column, most) if self.text(column) else None

    def one_of(self, column: str, known: Sequence[str]) -> str:
        """Return a name that is known; the first if the cell is empty."""
        if (text := self.text(column, known[0])) not in known:
            raise FormatError(f"line {self.line}: {column} is {text!r}; it must be {' or '.join(known)}")
        return text


def _row(cells: Cells) -> ServingRow:
    ratio = cells.number("length_ratio", 1.0) if cells.text("length_ratio") else None
    return ServingRow(
        line=cells.line,
        cells=cells.texts,
        backend=cells.name("backend"),
        version=cells.text("backend_version"),
        model=cells.name("model"),
        gpu=cells.name("gpu"),
        weight_dtype=cells.name("weight_dtype"),
        fp8_scaling=cells.text("fp8_scaling", "tensor"),
        kv_dtype=cells.text("kv_dtype"),
        tensor_parallel=cells.count("tensor_parallel", 1024),
        moe_ep=cells.count_or("moe_ep", 1024, 1),
        concurrency=cells.count("concurrency", _MOST_CLIENTS),
        input_tokens=cells.count("input_tokens", _MOST_TOKENS),
        output_tokens=cells.count("output_tokens", _MOST_TOKENS),
        length_ratio=ratio,
        requests_per_client=cells.any_count("requests_per_client", _MOST_REQUESTS),
        stream_interval=cells.count_or("stream_interval", _MOST_TOKENS, 1),
        max_num_seqs=cells.any_count("max_num_seqs", _MOST_CLIENTS),
        adapters=(adapters := cells.count_or("adapters", _MOST_ADAPTERS, 0)),
        adapter_rank=cells.count("adapter_rank", _MOST_RANK) if adapters else 0,
        adapter_projections=cells.one_of("adapter_projections", ADAPTER_PROJECTIONS),
        max_loras=cells.any_count("max_loras", _MOST_ADAPTERS),
        quality=cells.text("quality", OK),
        ttft_quality=(ttft_quality := cells.text("ttft_quality", OK)),
        measured={
            name: cells.number(name)
            for name in MEASURED
            if name != "ttft_ms" or ttft_quality == OK or cells.text("ttft_ms")
        },
    )


def as_json(columns: Sequence[str], cells: Mapping[str, str]) -> dict[str, str | int | float | None]:
    """Return a row's cells for JSON: counts and figures as numbers, an empty cell as null."""
    values: dict[str, str | int | float | None] = {}
    for name in columns:
        text = cells[name].strip()
        if not text:
            values[name] = None
        elif name in _COUNTS:
            values[name] = int(float(text))
        elif name in _NUMBERS:
            values[name] = float(text)
        else:
            values[name] = text
    return values
