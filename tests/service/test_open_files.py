"""A process that is out of file descriptors says so, once in a while."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lorrery.service import process


@contextlib.contextmanager
def _none_left() -> Iterator[None]:
    """Let no further file be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(held[0])


def test_whether_a_file_could_be_opened_is_known():
    assert process.can_open_file()
    with _none_left():
        assert not process.can_open_file()
    assert process.can_open_file()


async def test_a_shortage_is_said_at_once_and_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now, num_looks, enough = [1000.0], 0, asyncio.Event()

    def look() -> bool:
        nonlocal num_looks
        num_looks += 1
        now[0] += 20.0
        if num_looks == 9:
            enough.set()
        return num_looks < 3

    monkeypatch.setattr(process, "FILES_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(process, "can_open_file", look)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watching = asyncio.create_task(process.warn_when_no_file_can_be_opened())
    await enough.wait()
    watching.cancel()
    await asyncio.wait([watching])
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("out_of_file_descriptors") == 3  # looks 3, 6 and 9
