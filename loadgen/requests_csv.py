"""`requests.csv`: one line per request, formatted some thousands at a time."""

import csv
import math
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.outcome_table import OutcomeTable

__all__ = ["CSV_COLUMNS", "PRIORITY", "write_requests"]

CSV_COLUMNS = (
    "index",
    "status",
    "adapter_id",
    "tenant_id",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "intended_seconds",
    "sent_seconds",
    "first_token_seconds",
    "last_token_seconds",
    "end_seconds",
    "ttft_from_intended_ms",
    "ttft_from_sent_ms",
    "e2e_from_intended_ms",
    "e2e_from_sent_ms",
    "tpot_ms",
    "norm_tpot_from_sent_ms",
    "queue_seconds",
    "adapter_load_seconds",
    "prefill_seconds",
    "decode_seconds",
    "num_messages",
    "num_requeues",
    "worker_id",
    "finish_reason",
    "token_ids_crc32",
    "detail",
)
PRIORITY = "priority"
"""A further column, if a request has a priority other than 0."""

_ROWS_AT_ONCE = 10_000

Cells = Callable[[slice], Iterator[Any]]
"""Return the cells of one column for some rows."""


def write_requests(table: OutcomeTable, file: TextIO) -> None:
    """Write the header and all rows, in the table's order."""
    columns = _columns(table)
    assert len(columns) == len(CSV_COLUMNS)
    writer = csv.writer(file, lineterminator="\n")
    if table.priority.any():
        columns = (*columns, _whole(table.priority))
        writer.writerow((*CSV_COLUMNS, PRIORITY))
    else:
        writer.writerow(CSV_COLUMNS)
    for begin in range(0, len(table), _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, len(table)))
        writer.writerows(zip(*(cells(rows) for cells in columns), strict=True))


def _columns(table: OutcomeTable) -> tuple[Cells, ...]:
    intended, sent, first, last = (
        table.intended_seconds,
        table.sent_seconds,
        table.first_token_seconds,
        table.last_token_seconds,
    )
    tokens, detail = table.output_tokens, table.detail

    return (
        _whole(table.index),
        lambda rows: iter(table.status[rows]),
        lambda rows: (adapter_id or "" for adapter_id in table.adapter_id[rows]),
        lambda rows: iter(table.tenant_id[rows]),
        _whole(table.prompt_tokens),
        _whole(tokens),
        _whole(table.cached_tokens),
        *(_seconds(column) for column in (intended, sent, first, last, table.end_seconds)),
        *(_from(origin, to) for to in (first, last) for origin in (intended, sent)),
        lambda rows: _per_token_ms(last[rows] - first[rows], tokens[rows] - 1),
        lambda rows: _per_token_ms(last[rows] - sent[rows], tokens[rows]),
        *map(_seconds, (table.queue_seconds, table.adapter_load_seconds, table.prefill_seconds, table.decode_seconds)),
        _whole(table.num_messages),
        _whole(table.num_requeues),
        lambda rows: iter(table.worker_id[rows]),
        lambda rows: iter(table.finish_reason[rows]),
        lambda rows: ("" if crc is None else f"{crc:08x}" for crc in table.token_ids_crc32[rows]),
        lambda rows: (detail.get(row, "") for row in range(rows.start, rows.stop)),
    )


def _whole(column: npt.NDArray[np.int64]) -> Cells:
    return lambda rows: iter(column[rows].tolist())


def _seconds(column: npt.NDArray[np.float64]) -> Cells:
    return lambda rows: _numbers(column[rows], 6)


def _from(origin: npt.NDArray[np.float64], to: npt.NDArray[np.float64]) -> Cells:
    return lambda rows: _numbers((to[rows] - origin[rows]) * 1e3, 3)


def _numbers(values: npt.NDArray[np.float64], digits: int) -> Iterator[str]:
    return ("" if math.isnan(value) else f"{value:.{digits}f}" for value in values.tolist())


def _per_token_ms(seconds: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> Iterator[str]:
    return _numbers(np.divide(seconds, tokens, out=np.full(len(seconds), np.nan), where=tokens > 0) * 1e3, 3)
