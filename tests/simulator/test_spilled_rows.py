"""Rows come back as they were given, from memory and from a file."""

import errno
import os
from itertools import count

import numpy as np
import pytest

from lorrery.simulator import spilled_rows
from lorrery.simulator.spilled_rows import SpilledRows


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spilled_rows, "CHUNK_ROWS", 3)
    monkeypatch.setattr(spilled_rows, "CHUNKS_IN_MEMORY", 2)


def check(num_rows: int) -> SpilledRows:
    rows = SpilledRows(2)
    for number in range(num_rows):
        rows.add((number, -number))
    for _ in range(2):
        assert np.concatenate(list(rows.chunks())).tolist() == [[number, -number] for number in range(num_rows)]
    return rows


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 9, 10, 40])
def test_all_rows_come_back_in_order(num_rows: int) -> None:
    check(num_rows)


def test_few_rows_need_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spilled_rows.tempfile, "TemporaryFile", None)
    check(8)


def test_where_no_file_can_be_written_rows_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(spilled_rows.tempfile, "TemporaryFile", refuse)
    check(40)


def test_where_room_ends_no_row_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    write, numbers = os.pwrite, count()

    def write_some(file: int, content: bytes, at: int) -> int:
        if next(numbers) >= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:32], at)

    monkeypatch.setattr(spilled_rows.os, "pwrite", write_some)
    check(40)
    assert next(numbers) == 6
