"""The scheduler's journal: inputs and their results, in device time; `simulator.replay.journal` replays it.

JSON Lines; the first is the header, each further one has a `type`. docs/simulator.md describes them. A line is made
when its event happens, so lines are in the order in which the scheduler learnt of the events. Steps are gathered: those
of one plan are one line, unless a plan outlives the second after which everything is flushed.

Nothing here waits for the disk on the event loop: lines gather in memory, and a thread writes them once a second. A
crash loses at most what came after the last flush. A failing disk ends the journal, not the scheduler.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lorrery.scheduler import wire_routers
from lorrery.scheduler.core.cluster_facts import Arrived, GaveBack, Joined, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import AdapterLoaded, AdapterUnloaded, Cancelled, Finished, Handler
from lorrery.scheduler.core.inbox import LoadOnRequest, Recall, Retire
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.facts import Decided, FaultsSet, InputLate, InputTaken, Stepped
from lorrery.scheduler.routers import LiveRequest
from lorrery.scheduler.steps import NOBODY
from lorrery.scheduler.subscribers.record import FORMAT_VERSION, Decisions, Record, describe_events, tokens_checksum
from lorrery.service.errors import LorreryError
from lorrery.service.installed import VERSION
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.log import get_logger

FLUSH_SECONDS = 1.0

log = get_logger("scheduler.journal")


class Journal:
    """One scheduler's journal. An existing file is renamed, so that a restart hides nothing.

    Args:
        path: of the file.
        settings: the cluster's.
        lives: the scheduler's requests, by handle.

    Raises:
        LorreryError: the file cannot be written.
    """

    def __init__(self, path: Path, settings: Settings, lives: Mapping[int, LiveRequest]) -> None:
        self._path = path
        self._lives = lives
        self._lines: list[str] = []
        self._num_workers = 0
        self._workers: dict[Member, _WorkerLines] = {}
        self._writing = threading.Lock()
        self._ended = False
        self._with_prompts = settings.scheduler.prefix_cache.kind != "none" or settings.worker.output.mode != "random"
        try:
            _move_aside(path)
            self._file = path.open("x", encoding="utf-8")
        except OSError as error:
            raise LorreryError(f"scheduler.journal: {path}: {error.strerror}") from None
        header = {"format_version": FORMAT_VERSION, "kind": "journal", "lorrery": VERSION}
        self._add(header | {"settings": _what_matters(settings)})
        self._write()

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {
            Arrived: self._arrived,
            Refused: self._refused,
            Cancelled: self._ended_unplaced,
            Finished: self._ended_unplaced,
            AdapterLoaded: self._adapter_loaded,
            AdapterUnloaded: self._adapter_unloaded,
            FaultsSet: self._faults_set,
            Joined: self._joined,
            InputTaken: self._input_taken,
            InputLate: self._input_late,
            Decided: self._decided,
            Stepped: self._stepped,
            GaveBack: self._gave_back,
        }

    # --- the scheduler's lines --------------------------------------------------------------------------------------

    def _arrived(self, fact: Arrived, at_ps: int, member: Member | None) -> None:
        if not fact.accepted:
            return
        sequence, live = fact.sequence, self._lives[fact.sequence.handle]
        line: Record = {
            "type": "request",
            "handle": sequence.handle,
            "at_ps": sequence.arrived_ps,
            "request_id": live.request_id,
            "prompt_tokens": sequence.prompt_tokens,
            "sampling": wire_routers.sampling_record(live.sampling),
        }
        if self._with_prompts:
            line["prompt_token_ids"] = list(sequence.prompt_token_ids)
        if sequence.adapter is not None:
            line["adapter_id"] = sequence.adapter.adapter_id
            if sequence.adapter.version:
                line["adapter"] = {"rank": sequence.adapter.rank, "version": sequence.adapter.version}
        if sequence.tenant_id:
            line["tenant_id"] = sequence.tenant_id
        if sequence.weight is not None:
            line["weight"] = str(sequence.weight)
        if sequence.priority:
            line["priority"] = sequence.priority
        if sequence.skips_prefix_cache:
            line["skips_prefix_cache"] = True
        if sequence.cache_salt:
            line["cache_salt"] = sequence.cache_salt
        if sequence.produced_tokens:
            line["produced_token_ids"] = list(sequence.output_token_ids)
        if fact.resumed:
            line["resumed"] = True
        self._add(line)

    def _refused(self, fact: Refused, at_ps: int, member: Member | None) -> None:
        """Record a request that was not accepted, or that waited for a worker in vain."""
        handle = fact.sequence.handle
        line: Record = {
            "type": "refused",
            "at_ps": at_ps,
            "request_id": self._lives[handle].request_id,
            "reason": fact.refusal.reason.name.lower(),
        }
        if not fact.on_arrival or fact.figures is not None:
            line["handle"] = handle
        self._add(line if fact.figures is None else {**line, "candidates": fact.figures})

    def _ended_unplaced(self, fact: Cancelled | Finished, at_ps: int, member: Member | None) -> None:
        """Record a cancel of a request that no worker has."""
        if member is None:
            sequence = fact.sequence
            self._add({"type": "cancel", "handle": sequence.handle, "at_ps": at_ps, **_cancel(sequence)})

    def _adapter_loaded(self, fact: AdapterLoaded, at_ps: int, member: Member | None) -> None:
        line: Record = {"type": "adapter", "at_ps": at_ps, "adapter_id": fact.adapter_id}
        self._add({**line, "rank": fact.rank, "version": fact.version})

    def _adapter_unloaded(self, fact: AdapterUnloaded, at_ps: int, member: Member | None) -> None:
        self._add({"type": "adapter_removed", "at_ps": at_ps, "adapter_id": fact.adapter_id})

    def _faults_set(self, fact: FaultsSet, at_ps: int, member: Member | None) -> None:
        line: Record = {"at_ps": fact.from_ps, "rules": list(fact.rules)} | ({"add": True} if fact.add else {})
        if member is None:
            self._add({"type": "faults", **line})
        else:
            self._workers[member].add("faults", line)

    def _joined(self, fact: Joined, at_ps: int, member: Member | None) -> None:
        number, self._num_workers = self._num_workers, self._num_workers + 1
        self._add({"type": "attached", "worker": number, "at_ps": at_ps, "hello": asdict(fact.origin)})
        self._workers[fact.member] = _WorkerLines(number, self._add)

    # --- a worker's lines -------------------------------------------------------------------------------------------

    def _input_taken(self, fact: InputTaken, at_ps: int, member: Member | None) -> None:
        assert member is not None
        kind, line = _input(fact, at_ps)
        self._workers[member].add(kind, line)

    def _input_late(self, fact: InputLate, at_ps: int, member: Member | None) -> None:
        """Record an input that took effect at this boundary, later than it should have, or never.

        `missed`: plans already made at that boundary.
        """
        assert member is not None
        boundary_ps = None if fact.never else at_ps
        line: Record = {"input": fact.number, "handle": fact.handle, "boundary_ps": boundary_ps}
        self._workers[member].add("late", {**line, "missed": fact.missed} if fact.missed else line)

    def _decided(self, fact: Decided, at_ps: int, member: Member | None) -> None:
        """Record a decision, if it changes anything."""
        assert member is not None
        worker = self._workers[member]
        record = worker.decisions.record(fact.decision)
        if record is not None:
            worker.flush()
            worker.add("plan", {"at_ps": at_ps, **record})

    def _stepped(self, fact: Stepped, at_ps: int, member: Member | None) -> None:
        assert member is not None
        self._workers[member].stepped(fact)

    def _gave_back(self, fact: GaveBack, at_ps: int, member: Member | None) -> None:
        """Record that a worker drains or is gone, and which sequences are requeued for it."""
        worker = self._workers[fact.member]
        worker.flush()
        requeued = [(sequence.handle, sequence.produced_tokens) for sequence in fact.sequences]
        line: Record = {"at_ps": at_ps, "num_steps": worker.num_steps, "boundary_ps": worker.boundary_ps}
        worker.add("lost" if fact.lost else "drained", {**line, "requeued": requeued, **describe_events(fact.events)})
        if fact.lost:
            del self._workers[fact.member]

    def flush_steps(self, member: Member) -> None:
        """Add the line of a worker's gathered steps."""
        if (worker := self._workers.get(member)) is not None:
            worker.flush()

    def _add(self, line: Record) -> None:
        if not self._ended:
            self._lines.append(json.dumps(line, separators=(",", ":")) + "\n")

    # --- the file ---------------------------------------------------------------------------------------------------

    async def keep_flushed(self, before: Callable[[], None]) -> None:
        """Flush every second, until cancelled or until the file cannot be written; `before` adds gathered lines."""
        while not self._ended:
            await asyncio.sleep(FLUSH_SECONDS)
            before()
            await asyncio.to_thread(self._write)

    def close(self) -> None:
        """Write the rest and an end mark; later events are not recorded."""
        self._add({"type": "end"})
        self._write()
        self._ended = True
        with contextlib.suppress(OSError):  # if the disk has failed
            self._file.close()

    def _write(self) -> None:
        with self._writing:
            if self._ended:
                return
            lines = self._lines[:]
            del self._lines[: len(lines)]
            try:
                self._file.write("".join(lines))
                self._file.flush()
            except OSError as error:
                self._ended = True
                log.error("journal_failed", path=str(self._path), reason=error.strerror)


class _WorkerLines:
    """The lines of one worker, from attaching to leaving.

    Args:
        number: the worker's; one that comes back gets a new one.
        add: adds a line.
    """

    def __init__(self, number: int, add: Callable[[Record], None]) -> None:
        self._number = number
        self._add_line = add
        self.decisions = Decisions()
        self.num_steps = 0
        self.boundary_ps = 0
        self._steps = _Steps()

    def add(self, kind: str, line: Record) -> None:
        """Add a line of this worker."""
        self._add_line({"type": kind, "worker": self._number, **line})

    def stepped(self, fact: Stepped) -> None:
        """Gather a step."""
        steps, step = self._steps, fact.step
        index = len(steps.durations_ps)
        if not index:
            steps.start_ps = step.start_ps - fact.gap_ps
        if fact.gap_ps:
            steps.gaps.append((index, fact.gap_ps))
        steps.durations_ps.append(step.ran.end_ps - step.start_ps)
        steps.checksums.append(tokens_checksum(step.handles_u32, step.token_ids_u32))
        said = describe_events(fact.events)
        if said:
            steps.events.append((index, said))
        self.num_steps += 1
        self.boundary_ps = step.ran.end_ps

    def flush(self) -> None:
        """Add the line of the gathered steps."""
        steps = self._steps
        if not steps.durations_ps:
            return
        line: Record = {"start_ps": steps.start_ps, "durations_ps": steps.durations_ps, "checksums": steps.checksums}
        if steps.gaps:
            line["gaps_ps"] = steps.gaps
        if steps.events:
            line["events"] = steps.events
        self.add("steps", line)
        self._steps = _Steps()


def _cancel(sequence: Sequence) -> Record:
    withdrawal = sequence.withdrawal
    assert withdrawal is not None
    line: Record = {"cause": withdrawal.cause.word}
    return line if withdrawal.kept_tokens is None else {**line, "kept_tokens": withdrawal.kept_tokens}


def _input(fact: InputTaken, at_ps: int) -> tuple[str, Record]:
    """Return the kind of an input and its line."""
    what = fact.what
    line: Record = {"input": fact.number, "handle": NOBODY, "at_ps": at_ps}
    if fact.overdue:
        line["overdue"] = True
    match what:
        case Placed():
            line["handle"] = what.sequence.handle
            if what.moved_from:
                line["moved_from"] = what.moved_from
            return "placed", line if what.figures is None else {**line, "candidates": what.figures}
        case Withdrawn():
            line["handle"] = what.sequence.handle
            return "cancel", {**line, **_cancel(what.sequence)}
        case Recall():
            line["handle"] = what.handle
            return "recall", {**line, "to": what.to}
        case Retire():
            return "retire", {**line, "adapter_key": what.adapter_key}
        case LoadOnRequest(adapter):
            return "load", {**line, "adapter": [adapter.adapter_id, adapter.rank, adapter.version]}


class _Steps:
    """Steps gathered for one line."""

    def __init__(self) -> None:
        self.start_ps = 0
        self.durations_ps: list[int] = []
        self.checksums: list[int] = []
        self.gaps: list[tuple[int, int]] = []
        self.events: list[tuple[int, Record]] = []


def _what_matters(settings: Settings) -> dict[str, Any]:
    """Return the settings that determine batches and steps."""
    addresses = {"listen", "metrics"}
    content = settings.model_dump(
        mode="json",
        include={"format", "model", "catalogue", "time_scale", "faults", "adapters", "scheduler", "worker"},
        exclude={"scheduler": {"journal", "adapters_file", *addresses}, "worker": {"scheduler", *addresses}},
    )
    if settings.router.tokenizer is not None:  # workers spell their words with it
        content["router"] = {"tokenizer": str(settings.router.tokenizer.resolve())}
    return content


def _move_aside(path: Path) -> None:
    """Rename a file at `path`, if there is one, to the first free name with a numeric suffix; no device or pipe."""
    if path.is_file():
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(aside)
