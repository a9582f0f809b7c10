"""Measured kernels: one row per kernel on one GPU, as profilers write them.

Columns (others are kept and ignored): `op`, the kind of kernel; `latency_us`; the shape's, by op:

    gemm                                   m, n, k           m tokens, n output columns, k inner
    attention_prefill, attention_decode    batch, tokens, q_heads, kv_heads, head_size
    all_reduce                             message_bytes, num_gpus
    moe                                    tokens, hidden, ffn, top_k, num_experts, moe_tp, moe_ep, distribution
    lora                                   tokens, inner, outer, widest, slices, adapters, max_loras, rank
    lora_segmented                         tokens, inner, outer, slices, segments, slots, rank

A prefill is of `batch` prompts of `tokens` tokens, none cached; a decode of `batch` sequences of one new token each
after `tokens` cached ones; heads, experts and columns are those of one GPU's share; empty `moe_tp` and `moe_ep` mean 1,
an empty `distribution` means `balanced`. `gpu`, `dtype` (`bfloat16` if empty) and `kv_dtype` (16 bits if empty) state
the hardware and types; `kernel` is the library's kernel, which all-reduces need.

Constants are fitted on some shapes and judged on the others, so that an error is also that of shapes never fitted:
`is_fitted` decides, by a hash of the shape.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil, isfinite
from zlib import crc32

from lorrery.vocabulary.files import repeated
from lorrery.worker.device.lora_kernels import SEGMENT_TOKENS

__all__ = [
    "COUNTS",
    "OPS",
    "AllReduceShape",
    "AttentionShape",
    "GemmShape",
    "KernelRow",
    "KernelRowError",
    "LoraShape",
    "MoeShape",
    "SegmentedLoraShape",
    "is_fitted",
    "is_kernel_header",
    "read_kernel_rows",
]

MOST = 2**53
"""Largest count that a float holds exactly."""
JUDGED_SHARE = 3
"""One shape in this many is judged, not fitted."""


class KernelRowError(ValueError):
    """An invalid row; the message names line, value and cure."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """One matrix product: `m` rows of `k` elements times a `k` x `n` weight."""

    m: int
    n: int
    k: int

    @property
    def family(self) -> str:
        """Unit of fitting and judging: the weight, at every number of tokens."""
        return f"gemm {self.n} {self.k}"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of `batch` sequences: of `tokens` new tokens each, or of one after `tokens` cached ones."""

    batch: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_size: int

    @property
    def family(self) -> str:
        """Unit of fitting and judging: prefill and decode, in each KV type."""
        return f"attention {self.batch} {self.tokens + self.tokens % 2} {self.q_heads} {self.kv_heads} {self.head_size}"


@dataclass(frozen=True, slots=True)
class AllReduceShape:
    """One sum of `message_bytes` over `num_gpus`."""

    message_bytes: int
    num_gpus: int

    @property
    def family(self) -> str:
        """Unit of fitting and judging."""
        return f"all_reduce {self.message_bytes} {self.num_gpus}"


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The expert products of one layer for `tokens` tokens, with permutation and activation, on one GPU."""

    tokens: int
    hidden: int
    ffn: int
    top_k: int
    num_experts: int
    moe_tp: int
    moe_ep: int
    distribution: str

    @property
    def family(self) -> str:
        """Unit of fitting and judging: the layer with its partition, at every number of tokens."""
        return f"moe {self.hidden} {self.ffn} {self.top_k} {self.num_experts} {self.moe_tp} {self.moe_ep}"


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The adapters of one layer of `slices` projections side by side: shrink and expand, launched once for all.

    `widest` is the number of output elements of the widest projection, `outer` that of all; `max_loras` the places for
    adapters.
    """

    tokens: int
    inner: int
    outer: int
    widest: int
    slices: int
    adapters: int
    max_loras: int
    rank: int

    @property
    def family(self) -> str:
        """Unit of fitting and judging: the layer, with every batch and rank."""
        return f"lora {self.inner} {self.outer} {self.slices}"


@dataclass(frozen=True, slots=True)
class SegmentedLoraShape:
    """The adapters of such a layer by segmented kernels: `segments` of tokens, in grids with room for `slots`."""

    tokens: int
    inner: int
    outer: int
    slices: int
    segments: int
    slots: int
    rank: int

    @property
    def family(self) -> str:
        """Unit of fitting and judging: the layer, on the same side as for `LoraShape`."""
        return f"lora {self.inner} {self.outer} {self.slices}"


Shape = GemmShape | AttentionShape | AllReduceShape | MoeShape | LoraShape | SegmentedLoraShape

OPS: Mapping[str, type[Shape]] = {
    "gemm": GemmShape,
    "attention_prefill": AttentionShape,
    "attention_decode": AttentionShape,
    "all_reduce": AllReduceShape,
    "moe": MoeShape,
    "lora": LoraShape,
    "lora_segmented": SegmentedLoraShape,
}
"""Op -> the record of its shape, with fields named as the columns."""

COUNTS: Mapping[str, tuple[str, ...]] = {
    op: tuple(field.name for field in fields(shape) if field.name != "distribution") for op, shape in OPS.items()
}
"""Op -> the columns that hold counts."""
_ONE_IF_EMPTY = frozenset({"moe_tp", "moe_ep"})


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One measured kernel.

    Attributes:
        line: of the file, from 1.
        gpu: as spelled in the file.
        op: kind of kernel.
        kernel: the library's kernel.
        version: of the library, as in NVIDIA's files; empty in others.
        dtype: of the weights; for an all-reduce, of the summed numbers.
        kv_dtype: of the KV cache; empty where there is none.
        shape: None if the op is not one of `OPS`.
        latency_us: measured.
        cells: of the whole row, in the header's order.
    """

    line: int
    gpu: str
    op: str
    kernel: str
    version: str
    dtype: str
    kv_dtype: str
    shape: Shape | None
    latency_us: float
    cells: Sequence[str]

    @property
    def is_fitted(self) -> bool:
        """Whether constants are fitted on the row's shape; otherwise it judges them."""
        return self.shape is not None and is_fitted(self.shape)


@lru_cache(maxsize=1 << 16)
def is_fitted(shape: Shape) -> bool:
    """Return whether constants are fitted on a shape, at any type and on any GPU; otherwise it judges them."""
    return crc32(shape.family.encode()) % JUDGED_SHARE != 0


def read_kernel_rows(lines: Iterable[str]) -> tuple[list[str], Iterator[KernelRow]]:
    """Read the rows of a CSV file with a header.

    Returns:
        The columns, and the rows, which are read lazily.

    Raises:
        KernelRowError: an unsuitable header, or (while rows are iterated) an invalid row.
    """
    reader = csv.reader(lines, strict=True)
    try:
        columns = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise KernelRowError(f"line 1: {error}") from None
    if not columns:
        raise KernelRowError("is empty; the first line names the columns: op, latency_us, and those of the shapes")
    if missing := [name for name in ("op", "latency_us") if name not in columns]:
        raise KernelRowError(f"line 1: no column {', '.join(missing)}; there are {', '.join(columns)}")
    if twice := repeated(columns):
        raise KernelRowError(f"line 1: column {twice} is there twice; keep one")
    return columns, _rows(reader, columns)


def is_kernel_header(line: str) -> bool:
    """Return whether a file's first line is a header of kernel rows, not of step rows."""
    names = {name.strip().strip('"') for name in line.lstrip("\ufeff").split(",")}
    return {"op", "latency_us"} <= names


def _rows(reader: "Iterator[list[str]]", columns: Sequence[str]) -> Iterator[KernelRow]:
    line = 1
    make = _RowMaker(columns)
    try:
        for cells in reader:
            line = reader.line_num  # type: ignore[attr-defined]
            if cells:
                yield make.row(line, cells)
    except csv.Error as error:
        raise KernelRowError(f"line {reader.line_num}: {error}") from None  # type: ignore[attr-defined]
    except ValueError as error:
        raise KernelRowError(f"line {line}: {error}") from None


class _RowMaker:
    """Makes rows from cells; raises ValueError without the line number."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._at = {name: index for index, name in enumerate(columns)}
        self._counts = {
            op: [self._at[name] for name in names]
            for op, names in COUNTS.items()
            if all(name in self._at for name in names)
        }

    def row(self, line: int, cells: list[str]) -> KernelRow:
        if len(cells) != len(self._columns):
            raise ValueError(
                f"{len(cells)} cells for the {len(self._columns)} columns of the header; leave a cell empty where it"
                " does not apply"
            )
        op = self._text(cells, "op")
        return KernelRow(
            line,
            self._text(cells, "gpu"),
            op,
            self._text(cells, "kernel"),
            self._text(cells, "version"),
            self._text(cells, "dtype") or "bfloat16",
            self._text(cells, "kv_dtype"),
            self._shape(op, cells) if op in OPS else None,
            _microseconds(self._text(cells, "latency_us")),
            cells,
        )

    def _text(self, cells: Sequence[str], column: str) -> str:
        index = self._at.get(column)
        return "" if index is None else cells[index].strip()

    def _shape(self, op: str, cells: Sequence[str]) -> Shape:
        try:
            counts = [int(cells[index]) for index in self._counts[op]]
        except (KeyError, ValueError):  # a missing column, or a cell that is not a plain number
            counts = [self._count(op, name, cells) for name in COUNTS[op]]
        if min(counts) < 1 or max(counts) > MOST:
            counts = [self._count(op, name, cells) for name in COUNTS[op]]  # raises with the column's name
        shape = OPS[op]
        words = [self._text(cells, "distribution") or "balanced"] if shape is MoeShape else []
        return _checked(shape(*counts, *words))  # type: ignore[arg-type]  # COUNTS has the fields' order

    def _count(self, op: str, column: str, cells: Sequence[str]) -> int:
        text = self._text(cells, column)
        if text:
            return _count(column, text)
        if column in _ONE_IF_EMPTY:
            return 1
        where = "is empty" if column in self._at else "is not in the header"
        raise ValueError(f"{column} {where}; op {op} needs {', '.join(COUNTS[op])}")


def _checked(shape: Shape) -> Shape:
    """Return a shape; raise ValueError for one that no kernel runs."""
    if isinstance(shape, AllReduceShape) and shape.num_gpus < 2:
        raise ValueError("num_gpus is 1; an all-reduce is over at least 2")
    if isinstance(shape, AttentionShape) and shape.q_heads % shape.kv_heads:
        raise ValueError(f"q_heads is {shape.q_heads}; it must be a multiple of kv_heads, {shape.kv_heads}")
    if isinstance(shape, LoraShape):
        _check_lora(shape)
    if isinstance(shape, SegmentedLoraShape):
        _check_segmented(shape)
    if isinstance(shape, MoeShape) and shape.top_k > shape.num_experts:
        raise ValueError(f"top_k is {shape.top_k}; it must be at most num_experts, {shape.num_experts}")
    if isinstance(shape, MoeShape) and shape.moe_ep > shape.num_experts:
        raise ValueError(f"moe_ep is {shape.moe_ep}; it must be at most num_experts, {shape.num_experts}")
    return shape


def _check_lora(shape: LoraShape) -> None:
    if shape.adapters > shape.tokens:
        raise ValueError(f"adapters is {shape.adapters}; it must be at most tokens, {shape.tokens}")
    if shape.adapters > shape.max_loras:
        raise ValueError(f"adapters is {shape.adapters}; it must be at most max_loras, {shape.max_loras}")
    most = shape.outer - shape.slices + 1
    if not ceil(shape.outer / shape.slices) <= shape.widest <= most:
        raise ValueError(
            f"widest is {shape.widest}; the widest of {shape.slices} slices of {shape.outer} in all is from"
            f" {ceil(shape.outer / shape.slices)} to {most}"
        )


def _check_segmented(shape: SegmentedLoraShape) -> None:
    tokens, segments = shape.tokens, shape.segments
    if not ceil(tokens / SEGMENT_TOKENS) <= segments <= tokens:
        raise ValueError(
            f"segments is {segments}; {tokens} tokens make from {ceil(tokens / SEGMENT_TOKENS)} to {tokens} segments of"
            f" at most {SEGMENT_TOKENS}"
        )
    if segments > shape.slots:
        raise ValueError(f"segments is {segments}; it must be at most slots, {shape.slots}")


def _count(column: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:  # "1024.0", as spreadsheets and data frames write it
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        value = int(number) if isfinite(number) and number == int(number) else -1
    if not 1 <= value <= MOST:
        raise ValueError(f"{column} is {text[:40]!r}; it must be a whole number of at least 1") from None
    return value


def _microseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value > 0):
        raise ValueError(
            f"latency_us is {text[:40]!r}; it must be a number of microseconds above 0; leave a row out that was not"
            " measured"
        ) from None
    return value
