"""Sweeps that share a folder: at once, after one was killed, from another machine."""

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import pytest

from lorrery.sweeps.claims import CLAIMS_FOLDER, LEASE_SECONDS, Claims, open_claims
from tests.sweeps.faulty_queues import Gated
from tests.sweeps.test_sweep import sweep, table

GATED = "scheduler.policy=fcfs,tests.sweeps.faulty_queues:Gated"
NUM_SEEDS = 3
VALUES = (GATED, f"seed=1..{NUM_SEEDS}")


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[bytes]]:
    """Where each point with a gated queue says that it has begun."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    monkeypatch.setenv(Gated.FIFO, str(path))
    with path.open("r+b", buffering=0) as file:
        yield file


@contextmanager
def closed_gate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no point with a gated queue go on."""
    path = folder / "gate"
    path.touch()
    monkeypatch.setenv(Gated.GATE, str(path))
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        fcntl.flock(file, fcntl.LOCK_UN)  # closing it would not do: those that were forked have it too


def start(folder: Path, jobs: int) -> BaseProcess:
    process = get_context("fork").Process(target=sweep, args=(folder, *VALUES), kwargs={"jobs": jobs})
    process.start()
    return process


def end(process: BaseProcess) -> None:
    process.join(60)
    assert process.exitcode == 0


def num_queues(fifo: IO[bytes]) -> int:
    os.set_blocking(fifo.fileno(), False)
    return len(fifo.read(1 << 16) or b"")


QUEUES_PER_POINT = 2
"""One to see whether it can be made, and the one that is used."""


def test_two_at_once_run_each_point_once_and_have_the_same_table(
    tmp_path: Path, fifo: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with closed_gate(tmp_path, monkeypatch):
        both = [start(out, 1), start(out, 1)]
        assert fifo.read(1) + fifo.read(1) == b".."  # each runs a gated point now, and so not the same
    for process in both:
        end(process)
    assert num_queues(fifo) == NUM_SEEDS * QUEUES_PER_POINT - 2
    rows = table(out)
    assert [row["status"] for row in rows] == ["ok"] * 2 * NUM_SEEDS
    assert sorted(path.suffix for path in (out / "points").iterdir()) == [".json"] * 2 * NUM_SEEDS


def test_one_that_is_killed_goes_on_at_once_where_it_was(
    tmp_path: Path, fifo: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with closed_gate(tmp_path, monkeypatch):
        killed = start(out, 1)
        fifo.read(1)
        os.kill(killed.pid or 0, signal.SIGKILL)
        killed.join()
    assert list((out / "points" / CLAIMS_FOLDER).glob("*.0"))
    assert f"{NUM_SEEDS} of {2 * NUM_SEEDS} points are there already" in sweep(out, *VALUES)
    assert num_queues(fifo) == NUM_SEEDS * QUEUES_PER_POINT
    assert [row["status"] for row in table(out)] == ["ok"] * 2 * NUM_SEEDS
    assert not (out / "points" / CLAIMS_FOLDER).exists()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The file of a sweep on another machine, which has claimed `key`."""
    folder = tmp_path / CLAIMS_FOLDER
    folder.mkdir()
    (folder / "key.0").write_text("elsewhere", encoding="ascii")
    file = folder / "sweep-elsewhere"
    file.write_text(json.dumps({"host": "far", "machine": "far", "pid": "1", "started": "1"}), encoding="ascii")
    return file


def age(path: Path, seconds: float) -> None:
    now = path.stat().st_mtime
    os.utime(path, (now - seconds, now - seconds))


def test_a_claim_of_another_machine_holds_until_its_lease_is_over_and_one_takes_it_then(elsewhere: Path) -> None:
    folder = elsewhere.parent.parent
    with open_claims(folder) as one, open_claims(folder) as other:
        age(elsewhere, LEASE_SECONDS - 10)
        assert not one.claim("key")
        assert one.others() == ["far (pid 1)"]
        age(elsewhere, LEASE_SECONDS)
        assert other.claim("key")
        assert not one.claim("key")
        other.release("key")
        assert one.claim("key")


def test_a_claim_that_nobody_has_written_holds_for_a_lease(elsewhere: Path) -> None:
    claim = elsewhere.with_name("key.0")
    claim.write_text("", encoding="ascii")
    with open_claims(elsewhere.parent.parent) as claims:
        assert not claims.claim("key")
        age(claim, LEASE_SECONDS)
        assert claims.claim("key")


def test_why_a_point_failed_is_known_to_who_waited_for_it_and_forgotten_by_the_next(tmp_path: Path) -> None:
    with open_claims(tmp_path) as one, open_claims(tmp_path) as other:
        assert one.claim("key")
        assert not other.claim("key")
        one.release("key", "out of luck")
        assert other.failure("key") == "out of luck"
        with open_claims(tmp_path) as later:
            assert later.failure("key") is None
            assert later.claim("key")
            later.release("key")
        assert other.failure("key") is None


def test_who_leaves_gives_up_what_it_had(tmp_path: Path) -> None:
    claims = Claims(tmp_path / CLAIMS_FOLDER)
    assert claims.claim("key")
    claims.leave()
    assert not list(tmp_path.iterdir())
