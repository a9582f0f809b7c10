"""Claims to points, among sweeps that share a folder: on this machine or others, at the same time or in sequence.

Claims are files; the only atomic operation required of the file system is their creation, over NFS too (open(2),
O_EXCL):

    points/.claims/sweep-ID    one for each running sweep: where it runs; touched every `LEASE_SECONDS` / 6
    points/.claims/KEY.0       a claim to a point: the ID of its sweep
    points/.claims/KEY.1       a later claim, made when the holder of KEY.0 was gone, and so on
    points/.claims/KEY.failed  why a point failed, and in which sweep, for sweeps that wait for it

A sweep on the same machine is gone when its process is, so a killed sweep can be continued at once. A remote one is
gone when its file has not been touched for `LEASE_SECONDS`, by the clock of the file system, from which both files have
their times. A machine that slept for longer may find its point run by another: then both have written the same figures,
each file whole; if another sweep removed its own file, it writes it again.

Releasing a claim removes KEY.0 first. So KEY.1 counts only if KEY.0, with a holder that is gone, still exists after
KEY.1 does: otherwise KEY.0 was released in between, and may have been claimed anew.
"""

import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from lorrery.service.errors import LorreryError
from lorrery.service.files.writing import write_whole
from lorrery.service.linux import machine, process_started
from lorrery.simulator.sweep.outcome import FIGURES, Figure, Outcome
from lorrery.simulator.sweep.points import Point

KIND = "lorrery sweep point"
FORMAT_VERSION = 1


class PointStore:
    """The folder of finished points; created with the first one.

    Args:
        folder: of the points.
        command_line: options of all points, kept with each for readers.
    """

    def __init__(self, folder: Path, command_line: Sequence[str] = ()) -> None:
        self.folder = folder
        self._command_line = command_line

    def read(self, point: Point) -> Outcome | None:
        """Return a point's figures; None if it is missing, or not in this version's format."""
        try:
            content: Any = json.loads(self._path(point.key).read_text(encoding="utf-8"))
            figures: dict[str, Figure] = {name: content["figures"][name] for name in FIGURES}
            warnings = tuple(map(str, content.get("warnings", ())))
            known = content["kind"] == KIND and content["format_version"] == FORMAT_VERSION
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Outcome(point.key, figures, warnings=warnings) if known else None

    def write(self, point: Point, outcome: Outcome) -> None:
        """Store a finished point.

        Raises:
            LorreryError: it cannot be written.
        """
        content = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "point": point.own_values,
            "figures": outcome.figures,
            "warnings": outcome.warnings,
            "determined_by": {**(point.determined_by or {}), "command_line": self._command_line},
        }
        replace_file(self._path(point.key), (json.dumps(content, indent=1) + "\n").encode())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part; creates its folder.

    Raises:
        LorreryError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None


__all__ = ["LEASE_SECONDS", "Claims", "PointStore", "open_claims"]

LEASE_SECONDS = 60.0
"""Longer than NFS clients cache a file's times (`acregmax`)."""

CLAIMS_FOLDER = ".claims"


@contextmanager
def open_claims(folder: Path) -> Iterator["Claims"]:
    """Join the sweeps of a folder of points; at the end release all claims that are still held.

    Raises:
        LorreryError: the folder cannot be written.
    """
    claims = Claims(folder / CLAIMS_FOLDER)
    over = Event()
    beat = Thread(target=claims.stay, args=(over,), name="lease", daemon=True)
    try:
        beat.start()
        yield claims
    finally:
        over.set()
        beat.join()
        claims.leave()


class Claims:
    """One sweep's claims.

    Args:
        folder: of claims; created if needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._id = uuid4().hex
        self._own = folder / f"sweep-{self._id}"
        self._place = _place()
        self._held: dict[str, int] = {}
        self._seen: dict[str, str] = {}
        try:
            self._write_own()
        except OSError as error:
            raise LorreryError(f"{error.filename}: {error.strerror}") from None
        for other in folder.glob("sweep-*"):
            if not self._lives(other.name.removeprefix("sweep-")):
                other.unlink(missing_ok=True)

    def claim(self, key: str) -> bool:
        """Claim a point, unless another running sweep holds it.

        Raises:
            LorreryError: the folder cannot be written.
        """
        number = 0
        while True:
            path = self._folder / f"{key}.{number}"
            try:
                with path.open("x", encoding="ascii") as file:
                    file.write(self._id)
            except FileExistsError:
                try:
                    holder = self._holder(path)
                except FileNotFoundError:  # released
                    number = 0
                    continue
                if holder is not None:
                    self._seen[key] = holder
                    return False
                number += 1
            except OSError as error:
                raise LorreryError(f"{path}: {error.strerror}") from None
            else:
                if self._are_gone(key, number):
                    self._held[key] = number
                    return True
                path.unlink(missing_ok=True)
                number = 0

    def release(self, key: str, error: str = "") -> None:
        """Release a claim.

        Args:
            key: of a claimed point.
            error: why it failed; empty if it did not.

        Raises:
            LorreryError: the folder cannot be written; the claim is kept.
        """
        failure = self._folder / f"{key}.failed"
        if error:
            replace_file(failure, json.dumps({"sweep": self._id, "error": error}).encode())
        try:
            if not error:
                failure.unlink(missing_ok=True)
            for number in range(self._held[key] + 1):
                (self._folder / f"{key}.{number}").unlink(missing_ok=True)
        except OSError as failed:
            raise LorreryError(f"{failed.filename}: {failed.strerror}") from None
        del self._held[key]

    def failure(self, key: str) -> str | None:
        """Return why a point failed in the sweep last seen to hold it; None: it did not."""
        if key not in self._seen:
            return None
        with suppress(OSError, ValueError):
            found: dict[str, str] = json.loads((self._folder / f"{key}.failed").read_text(encoding="utf-8"))
            if found["sweep"] == self._seen[key]:
                return found["error"]
        return None

    def others(self) -> list[str]:
        """Return where the sweeps run that were found holding points wanted here."""
        places = (_read_place(self._folder / f"sweep-{one}") for one in dict.fromkeys(self._seen.values()))
        return [f"{place['host']} (pid {place['pid']})" for place in places if place]

    def stay(self, over: Event) -> None:
        """Renew the lease until the sweep is over."""
        while not over.wait(LEASE_SECONDS / 6):
            with suppress(OSError):
                self._touch_own()

    def leave(self) -> None:
        """Release all claims."""
        with suppress(OSError, LorreryError):
            for key in list(self._held):
                self.release(key)
            self._own.unlink(missing_ok=True)
            self._folder.rmdir()  # if no other sweep uses it

    def _write_own(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._own.write_text(json.dumps(self._place), encoding="utf-8")

    def _touch_own(self) -> None:
        try:
            os.utime(self._own)
        except FileNotFoundError:  # another sweep took this one for gone
            self._write_own()

    def _are_gone(self, key: str, number: int) -> bool:
        """Return whether all claims to a point below this one exist, and their sweeps are gone."""
        try:
            return all(self._holder(self._folder / f"{key}.{lower}") is None for lower in range(number))
        except FileNotFoundError:
            return False

    def _holder(self, path: Path) -> str | None:
        """Return the holder of a claim; None: it is gone.

        Raises:
            FileNotFoundError: there is no such claim.
        """
        holder = path.read_text(encoding="ascii")
        if not holder:  # created, and not yet written
            return "" if self._is_fresh(path) else None
        return holder if self._lives(holder) else None

    def _lives(self, holder: str) -> bool:
        own = self._folder / f"sweep-{holder}"
        place = _read_place(own)
        if place is None:
            return own.exists() and self._is_fresh(own)
        if place["machine"] == self._place["machine"]:
            return process_started(int(place["pid"])) == place["started"]
        return self._is_fresh(own)

    def _is_fresh(self, path: Path) -> bool:
        """Return whether a file was touched within the lease, by the file system's clock."""
        self._touch_own()
        try:
            with path.open("rb") as file:  # an NFS client refreshes a file's times when it opens it
                return self._own.stat().st_mtime - os.fstat(file.fileno()).st_mtime < LEASE_SECONDS
        except FileNotFoundError:
            return False


def _place() -> dict[str, str]:
    """Describe where this process runs; processes with equal `machine` see each other's pids."""
    pid = os.getpid()
    return {"host": platform.node(), "machine": machine(), "pid": str(pid), "started": process_started(pid) or ""}


def _read_place(path: Path) -> dict[str, str] | None:
    try:
        place: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return place
