"""Sweeps that share a folder: at once, after one was killed, from another machine."""

import errno
import fcntl
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import IO

import pytest

from lorrery.service.errors import LorreryError
from lorrery.simulator.sweep.claims import CLAIMS_FOLDER, LEASE_SECONDS, Claims, open_claims
from tests.simulator.faulty_queues import Gated
from tests.simulator.sweep.sweeping import sweep, table

GATED = "scheduler.policy=fcfs,tests.simulator.faulty_queues:Gated"
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
    # The last point, which is gated, comes second.
    assert f"1 of {2 * NUM_SEEDS} points are there already" in sweep(out, *VALUES)
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


def test_a_failure_of_an_earlier_run_is_not_that_of_who_has_the_point_now(tmp_path: Path) -> None:
    with open_claims(tmp_path) as earlier:
        assert earlier.claim("key")
        earlier.release("key", "out of luck")
    with open_claims(tmp_path) as one, open_claims(tmp_path) as other:
        assert one.claim("key")
        assert not other.claim("key")
        assert other.failure("key") is None


@pytest.mark.parametrize("claimed_anew", [False, True])
def test_a_claim_that_is_released_while_another_looks_is_had_by_one(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, *, claimed_anew: bool
) -> None:
    folder = elsewhere.parent.parent
    age(elsewhere, LEASE_SECONDS)
    with open_claims(folder) as first, open_claims(folder) as second, open_claims(folder) as third:
        assert first.claim("key")  # as key.1, after one who is gone
        looked = Claims._holder

        def release_after_first_look(claims: Claims, path: Path) -> str | None:
            monkeypatch.setattr(Claims, "_holder", looked)
            holder = looked(claims, path)
            first.release("key")
            if claimed_anew:
                assert third.claim("key")
            return holder

        monkeypatch.setattr(Claims, "_holder", release_after_first_look)
        assert second.claim("key") is not claimed_anew
        assert third.claim("key") is False
        assert [path.name for path in elsewhere.parent.glob("key.*")] == ["key.0"]


def test_a_sweep_that_was_taken_for_gone_takes_part_again(elsewhere: Path) -> None:
    with open_claims(elsewhere.parent.parent) as claims:
        (own,) = set(elsewhere.parent.glob("sweep-*")) - {elsewhere}
        own.unlink()
        assert not claims.claim("key")
        assert own.exists()
        elsewhere.unlink()
        elsewhere.with_name("key.0").unlink()


def test_a_sweep_writes_its_file_again_as_long_as_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = Claims(tmp_path / CLAIMS_FOLDER)
    (own,) = (tmp_path / CLAIMS_FOLDER).iterdir()
    own.unlink()
    beats = iter([False, True])
    over = Event()
    monkeypatch.setattr(over, "wait", lambda _: next(beats))
    claims.stay(over)
    assert json.loads(own.read_text(encoding="utf-8"))["pid"] == str(os.getpid())


def test_a_full_disk_is_an_error_of_ours_and_leaves_no_part_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with open_claims(tmp_path) as claims:
        assert claims.claim("key")
        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(LorreryError, match=r"key\.failed: No space left"):
            claims.release("key", "out of luck")
        assert {path.name for path in (tmp_path / CLAIMS_FOLDER).glob("*key*")} == {"key.0"}
    assert not list(tmp_path.iterdir())


def test_who_leaves_gives_up_what_it_had(tmp_path: Path) -> None:
    claims = Claims(tmp_path / CLAIMS_FOLDER)
    assert claims.claim("key")
    claims.leave()
    assert not list(tmp_path.iterdir())
