"""The scheduler's journal: inputs and their results, in device time; `simulator.journal` replays it.

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
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lorrery.scheduler.core.plan import Event, Idle, Plan
from lorrery.scheduler.core.record import FORMAT_VERSION, Decisions, Record, describe_events, tokens_checksum
from lorrery.scheduler.core.refusals import RefusalReason
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.core.watched_candidate import Figures
from lorrery.scheduler.effects import NOBODY, Awaited
from lorrery.scheduler.messages import StepReport, WorkerHello
from lorrery.service.errors import LorreryError
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.log import get_logger
from lorrery.service.version import VERSION

FLUSH_SECONDS = 1.0

log = get_logger("scheduler.journal")


class Journal:
    """One scheduler's journal. An existing file is renamed, so that a restart hides nothing.

    Args:
        path: of the file.
        settings: the cluster's.

    Raises:
        LorreryError: the file cannot be written.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._lines: list[str] = []
        self._num_workers = 0
        self._writing = threading.Lock()
        self._ended = False
        self.with_prompts = settings.scheduler.prefix_cache.kind != "none" or settings.worker.output.mode != "random"
        try:
            _move_aside(path)
            self._file = path.open("x", encoding="utf-8")
        except OSError as error:
            raise LorreryError(f"scheduler.journal: {path}: {error.strerror}") from None
        header = {"format_version": FORMAT_VERSION, "kind": "journal", "lorrery": VERSION}
        self._add(header | {"settings": _what_matters(settings)})
        self._write()

    # --- lines ------------------------------------------------------------------------------------------------------

    def request(self, sequence: Sequence, request_id: str, sampling: Record, *, resumed: bool) -> None:
        """Record an accepted request."""
        line: Record = {
            "type": "request",
            "handle": sequence.handle,
            "at_ps": sequence.arrived_ps,
            "request_id": request_id,
            "prompt_tokens": sequence.prompt_tokens,
            "sampling": sampling,
        }
        if self.with_prompts:
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
        if resumed:
            line["resumed"] = True
        self._add(line)

    def refused(
        self,
        request_id: str,
        at_ps: int,
        reason: RefusalReason,
        handle: int | None = None,
        figures: dict[str, Figures] | None = None,
    ) -> None:
        """Record a request that was not accepted, or that waited for a worker in vain.

        Args:
            request_id: the client's.
            at_ps: now.
            reason: of the refusal.
            handle: of a request recorded before.
            figures: what the placement had read of each candidate when it raised; None: it did not raise.
        """
        line: Record = {"type": "refused", "at_ps": at_ps, "request_id": request_id, "reason": reason.name.lower()}
        if handle is not None:
            line["handle"] = handle
        self._add(line if figures is None else {**line, "candidates": figures})

    def cancelled_unplaced(self, sequence: Sequence, at_ps: int) -> None:
        """Record a cancel of a request that no worker has."""
        self._add({"type": "cancel", "handle": sequence.handle, "at_ps": at_ps, **_cancel(sequence)})

    def adapter(self, adapter_id: str, rank: int, version: int, at_ps: int) -> None:
        """Record an adapter that was loaded at run time, or, with rank 0, unloaded."""
        line: Record = {"type": "adapter" if rank else "adapter_removed", "at_ps": at_ps, "adapter_id": adapter_id}
        self._add({**line, "rank": rank, "version": version} if rank else line)

    def faults(self, rules: Iterable[str], at_ps: int, *, add: bool) -> None:
        """Record an operator's faults, which hold from `at_ps` on, in place of the last ones or beside them."""
        self._add({"type": "faults", "at_ps": at_ps, "rules": list(rules)} | ({"add": True} if add else {}))

    def attached(self, hello: WorkerHello, at_ps: int) -> "WorkerJournal":
        """Record a worker that was attached; return the journal of its inputs and steps."""
        number, self._num_workers = self._num_workers, self._num_workers + 1
        self._add({"type": "attached", "worker": number, "at_ps": at_ps, "hello": asdict(hello)})
        return WorkerJournal(number, self._add)

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


class WorkerJournal:
    """Records the inputs and steps of one worker, from attaching to leaving.

    Args:
        number: the worker's; one that comes back gets a new one.
        add: adds a line.
    """

    def __init__(self, number: int, add: Callable[[Record], None]) -> None:
        self._number = number
        self._add_line = add
        self._decisions = Decisions()
        self._num_steps = 0
        self._boundary_ps = 0
        self._steps = _Steps()

    def _add(self, kind: str, line: Record) -> None:
        self._add_line({"type": kind, "worker": self._number, **line})

    def faults(self, rules: list[str], at_ps: int, *, add: bool) -> None:
        """Record an operator's faults that the worker follows by itself, as `Journal.faults` does."""
        self._add("faults", {"at_ps": at_ps, "rules": rules} | ({"add": True} if add else {}))

    def placed(
        self,
        number: int,
        handle: int,
        at_ps: int,
        figures: dict[str, Figures] | None,
        moved_from: str = "",
        *,
        overdue: bool,
    ) -> None:
        """Record a request given to the worker.

        Args:
            number: of the input, from 0.
            handle: the request's.
            at_ps: its stamp.
            figures: what the placement read of each candidate, by its id; None: it was not called.
            moved_from: the id of the worker at which it waited; empty: it did not move.
            overdue: whether the boundary at which it should have taken effect has passed.
        """
        line = _input(number, handle, at_ps, overdue)
        if moved_from:
            line["moved_from"] = moved_from
        self._add("placed", line if figures is None else {**line, "candidates": figures})

    def cancelled(self, number: int, sequence: Sequence, at_ps: int, *, overdue: bool) -> None:
        """Record a cancel that is sent to the worker."""
        self._add("cancel", {**_input(number, sequence.handle, at_ps, overdue), **_cancel(sequence)})

    def recalled(self, number: int, handle: int, to: str, at_ps: int, *, overdue: bool) -> None:
        """Record a request that is to move to another worker, if it still waits when the recall takes effect."""
        self._add("recall", {**_input(number, handle, at_ps, overdue), "to": to})

    def retired(self, number: int, adapter_key: str, at_ps: int, *, overdue: bool) -> None:
        """Record an adapter that the worker is to release once no sequence there has it."""
        self._add("retire", {**_input(number, NOBODY, at_ps, overdue), "adapter_key": adapter_key})

    def load(self, number: int, adapter: Adapter, at_ps: int, *, overdue: bool) -> None:
        """Record an adapter that the worker is to load on an operator's request."""
        named = [adapter.adapter_id, adapter.rank, adapter.version]
        self._add("load", {**_input(number, NOBODY, at_ps, overdue), "adapter": named})

    def late(self, event: Awaited, boundary_ps: int | None) -> None:
        """Record an input that took effect at this boundary, later than it should have; None: it left before.

        `missed`: plans already made at that boundary.
        """
        line: Record = {"input": event.number, "handle": event.handle, "boundary_ps": boundary_ps}
        self._add("late", {**line, "missed": event.missed} if event.missed else line)

    def decided(self, decision: Plan | Idle, at_ps: int) -> None:
        """Record a decision, if it changes anything."""
        record = self._decisions.record(decision)
        if record is not None:
            self.flush()
            self._add("plan", {"at_ps": at_ps, **record})

    def stepped(self, step: StepReport, gap_ps: int, events: Iterable[Event]) -> None:
        """Record a step; `gap_ps`: how long the worker stood still before it."""
        steps = self._steps
        index = len(steps.durations_ps)
        if not index:
            steps.start_ps = step.start_ps - gap_ps
        if gap_ps:
            steps.gaps.append((index, gap_ps))
        steps.durations_ps.append(step.ran.end_ps - step.start_ps)
        steps.checksums.append(tokens_checksum(step.handles_u32, step.token_ids_u32))
        said = describe_events(events)
        if said:
            steps.events.append((index, said))
        self._num_steps += 1
        self._boundary_ps = step.ran.end_ps

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
        self._add("steps", line)
        self._steps = _Steps()

    def gave_back(self, kind: str, at_ps: int, sequences: Iterable[Sequence], events: Iterable[Event]) -> None:
        """Record that a worker drains ("drained") or is gone ("lost"), and which sequences are requeued for it."""
        self.flush()
        requeued = [(sequence.handle, sequence.produced_tokens) for sequence in sequences]
        line: Record = {"at_ps": at_ps, "num_steps": self._num_steps, "boundary_ps": self._boundary_ps}
        self._add(kind, {**line, "requeued": requeued, **describe_events(events)})


def _cancel(sequence: Sequence) -> Record:
    withdrawal = sequence.withdrawal
    assert withdrawal is not None
    line: Record = {"cause": withdrawal.cause.word}
    return line if withdrawal.kept_tokens is None else {**line, "kept_tokens": withdrawal.kept_tokens}


def _input(number: int, handle: int, at_ps: int, overdue: bool) -> Record:
    line: Record = {"input": number, "handle": handle, "at_ps": at_ps}
    return {**line, "overdue": True} if overdue else line


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
