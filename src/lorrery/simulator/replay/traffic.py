"""Reads from a journal what clients and workers did, apart from what the scheduler made of it, to play it elsewhere.

A replay (`replay.py`) repeats a journal's decisions; here only the causes are taken: each request with its arrival, its
prompt where the journal has it, and its true output; cancels; workers that came and went. Beside them stands what
became of each request, which is what a simulation of the same traffic is compared with.

What follows the traffic into other settings:

* An output is as long as it was live. One that its router ended at a stop string ends with the tokens that it kept.
* A client that left, or whose deadline passed, leaves as long after its arrival as it did live, if it still waits.
* Workers come and go when they did, until the last request has ended live: what leaves then leaves because the run
  is over.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np

from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.workload.arrays import Requests
from lorrery.loadgen.workload.distribution import distribution
from lorrery.loadgen.workload.outcome import OutcomeTable
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.refusals import DropReason, RefusalReason, dropped
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.scheduler.subscribers.record import Record
from lorrery.service.errors import FormatError
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.cluster import SimulatedCluster
from lorrery.simulator.interpreter import garbage_collected_seldom
from lorrery.simulator.loop.outcomes import OutcomeRecorder
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.state import OUTCOME_OF_REFUSAL
from lorrery.simulator.replay.journal import BAD_LINE, Journal, not_a_line, open_journal
from lorrery.simulator.replay.parts import ReplayedRequest, announced, content_of, settings_of
from lorrery.vocabulary.endings import CancelCause, FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.build import answers_of
from lorrery.worker.device.answers import Answers
from lorrery.worker.device.output import Ending, tokens_between

_NO_CAUSE: Final = tuple(f'{{"type":"{kind}"' for kind in ("placed", "late", "recall", "retire", "adapter_removed"))
"""Beginnings of lines, as the scheduler writes them, that say nothing of traffic."""
_NUMBER: Final = {"attached": 1, "lost": -1}
_REASONS: Final = {reason.word: reason for reason in FinishReason}


@dataclass(slots=True, eq=False)
class RecordedRequest:
    """A request of a journal.

    Attributes:
        request_id: its router's.
        asked: as it arrived.
        ending: where its output ends.
        live: what became of it.
    """

    request_id: str
    asked: ReplayedRequest
    ending: Ending
    live: SimulatedRequest


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """A worker that attaches (`attached`), drains (`drained`) or is gone (`lost`).

    Attributes:
        place: number of its place, see `Traffic.kinds`.
    """

    at_ps: int
    place: int
    kind: str


@dataclass(slots=True)
class Traffic:
    """What clients and workers of a journal did.

    Attributes:
        journal: its header.
        content: its settings, as tables.
        settings: the same, as settings.
        requests: in order of arrival; a request's index is its place here.
        cancels: stamp and index, in order.
        kinds: what the workers of each place announced, as settings of `[worker]`. A worker that comes takes a place
            of its kind that another one has left, if there is one.
        changes: of workers, in order.
        adapters: rank of each adapter loaded at run time, by name.
        left_out: number of lines by type that no counterfactual plays.
        start_ps: the origin of times: the first arrival; with faults in the settings, whose times count from it, the
            first attach.
    """

    journal: Journal
    content: dict[str, Any]
    settings: Settings
    answers: Answers
    requests: list[RecordedRequest] = field(default_factory=list)
    cancels: list[tuple[int, int]] = field(default_factory=list)
    kinds: list[Record] = field(default_factory=list)
    changes: list[WorkerChange] = field(default_factory=list)
    adapters: dict[str, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    start_ps: int = 0

    @property
    def has_prompts(self) -> bool:
        """Whether the journal has the prompts' tokens."""
        return bool(self.requests[0].asked.sequence.prompt_token_ids)

    @property
    def num_at_first(self) -> int:
        """Workers at the first arrival, at least 1."""
        first_ps = self.requests[0].asked.sequence.arrived_ps
        return max(1, sum(_NUMBER.get(change.kind, 0) for change in self.changes if change.at_ps <= first_ps))

    def workload(self) -> Requests:
        """Return the requests as a workload, in order."""
        sequences = [request.asked.sequence for request in self.requests]
        start_ps = self.start_ps
        return Requests(
            at_seconds=[(one.arrived_ps - start_ps) / PS_PER_SECOND for one in sequences],
            prompt_tokens=[one.prompt_tokens for one in sequences],
            output_tokens=[max(1, request.ending.output_tokens) for request in self.requests],
            adapter_id=[None if one.adapter is None else one.adapter.adapter_id for one in sequences],
            tenant_id=[one.tenant_id for one in sequences],
            priority=[one.priority for one in sequences],
            cache_salt=[one.cache_salt for one in sequences],
        )

    def outcomes(self) -> OutcomeTable:
        """Return what became of the requests, at the scheduler: times are those of its steps, without the network."""
        recorder = OutcomeRecorder(self.start_ps)
        for request in self.requests:
            recorder.add(request.live)
        return recorder.table(distribution(np.empty(0)))

    def play(self, cluster: SimulatedCluster, rows: Many[WorkloadRequest]) -> Iterator[SimulatedRequest]:
        """Run the requests on a cluster; yield them as they end.

        Args:
            cluster: that has not run anything; its workers are at the places in order, if these are to come and go.
            rows: of `workload`, in order.
        """
        simulation = cluster.simulation
        offset_ps = simulation.now_ps - self.start_ps
        first_ps = self.requests[0].asked.sequence.arrived_ps
        there = {change.place for change in self.changes if change.kind == "attached" and change.at_ps <= first_ps}
        for place in {change.place for change in self.changes} - there:
            simulation.membership.lose(simulation.workers[place])
        for change in self.changes:
            if change.at_ps > first_ps:
                simulation.at(offset_ps + change.at_ps, partial(_change, cluster, change))
        keeps = cluster.keeps_prefixes
        builder = cluster.builder(LoadOptions()) if keeps and not self.has_prompts else None

        def arrivals() -> Iterator[tuple[int, SimulatedRequest]]:
            for index, request in enumerate(self.requests):
                at_ps = offset_ps + request.asked.sequence.arrived_ps
                built = self._build(cluster, index, request, at_ps, with_prompts=keeps and builder is None)
                if builder is not None:
                    builder.add_prompt(built.sequence, rows[index], ())
                yield at_ps, built

        return simulation.run(arrivals(), [(offset_ps + at_ps, index) for at_ps, index in self.cancels])

    def _build(
        self, cluster: SimulatedCluster, index: int, request: RecordedRequest, at_ps: int, *, with_prompts: bool
    ) -> SimulatedRequest:
        asked, adapter = request.asked.sequence, request.asked.sequence.adapter
        if adapter is not None:
            adapter = cluster.make_adapter(adapter.adapter_id, adapter.rank, adapter.version)
        made = SimulatedRequest(
            index, asked.prompt_tokens, asked.max_new_tokens, at_ps, request.ending, adapter, asked.tenant_id
        )
        produced = len(request.asked.token_ids)
        if with_prompts or produced:
            prompt, output = (asked.prompt_token_ids, self._output(request)) if with_prompts else ((), ())
            made.sequence = Sequence(
                index,
                asked.prompt_tokens,
                asked.max_new_tokens,
                at_ps,
                adapter,
                asked.tenant_id,
                prompt,
                output,
                produced,
            )
        sequence = made.sequence
        sequence.ignore_eos, sequence.priority, sequence.weight = asked.ignore_eos, asked.priority, asked.weight
        sequence.skips_prefix_cache, sequence.cache_salt = asked.skips_prefix_cache, asked.cache_salt
        return made

    def _output(self, request: RecordedRequest) -> "array[int]":
        """Return the output, which a later turn's prompt may repeat."""
        device = request.asked.device(self.answers)
        first, end = device.produced_tokens, request.ending
        tokens = tokens_between(
            device.seed, first, end.output_tokens, end, device.given, device.sampled, self.answers.table
        )
        return request.asked.token_ids + array("I", tokens.tobytes())


def _change(cluster: SimulatedCluster, change: WorkerChange) -> None:
    simulation = cluster.simulation
    worker, membership = simulation.workers[change.place], simulation.membership
    if change.kind == "attached":
        membership.attach(worker)
    elif change.kind == "lost":
        membership.leave(worker)
    elif worker.attached and worker.order not in membership.leaving:
        membership.drain(worker, lambda: None)


def read_traffic(path: Path) -> Traffic:
    """Read the traffic of a journal, gzip-compressed or not.

    Raises:
        FormatError: as `read_journal`; also if no request is in it, or settings are in it that this version does not
            know.
        SettingsError: settings that cannot be met here.
    """
    journal, lines = open_journal(path)
    content = content_of(journal)
    settings = settings_of(content, path)
    traffic = Traffic(journal, content, settings, answers_of(settings))
    reader = _Reader(traffic)
    decode = json.JSONDecoder().raw_decode  # a fifth faster than `json.loads`
    with garbage_collected_seldom():
        for number, text in lines:
            if text.startswith(_NO_CAUSE):
                continue
            try:
                reader.take(decode(text)[0])
            except BAD_LINE as error:
                raise not_a_line(path, number, error) from None
    if not (reader.has_requests and traffic.changes):
        raise FormatError(f"{path}: there is nothing to play: no request, or no worker, is in it")
    reader.finish()
    return traffic


@dataclass(slots=True)
class _Worker:
    """A worker while its lines are read.

    Attributes:
        steps_ps: ends of its steps, where outputs may be held back; from them follows when the last token came.
        first_steps: by handle, number of the step that gave the first token.
    """

    name: str
    place: int
    holds: bool = False
    steps_ps: "array[int]" = field(default_factory=lambda: array("q"))
    first_steps: dict[int, int] = field(default_factory=dict)


class _Reader:
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        factory = ReplicaFactory(traffic.settings)
        self._make_adapter = factory.adapter
        self._adapters = {name: factory.adapter(name, rank) for name, rank in traffic.settings.adapters.expand()}
        self._requests: dict[int, RecordedRequest] = {}
        self._cancels: list[tuple[int, int]] = []
        self._deadlines: set[int] = set()
        self._workers: dict[int, _Worker] = {}
        self._free: list[int] = []
        self._is_static = traffic.settings.scheduler.batching == "static"

    @property
    def has_requests(self) -> bool:
        """Whether there was a request."""
        return bool(self._requests)

    def take(self, line: Record) -> None:
        match line["type"]:
            case "request":
                self._request(line)
            case "steps":
                if "events" in line or self._is_static:
                    self._steps(line)
            case "plan":
                worker = self._workers[line["worker"]]
                if not line.get("idle"):
                    worker.holds = line.get("hold", False)
                self._events(line, line["at_ps"], worker)
            case "cancel":
                self._cancel(line)
            case "refused":
                self._refused(line)
            case "attached":
                self._attached(line)
            case "drained" | "lost":
                self._gone(line)
            case "adapter":
                self._traffic.adapters[line["adapter_id"]] = line["rank"]
                self._adapters[line["adapter_id"]] = self._make_adapter(line["adapter_id"], line["rank"], 0)
            case "faults" | "load":
                self._traffic.left_out[line["type"]] += 1
            case "end":
                self._traffic.journal.complete = True

    def finish(self) -> None:
        """Put everything in order; there must be a request and a worker."""
        requests = sorted(self._requests.items(), key=lambda one: one[1].asked.sequence.arrived_ps)
        places = {handle: index for index, (handle, _) in enumerate(requests)}
        for index, (_, request) in enumerate(requests):
            request.live.handle = index
            request.live.outcome = request.live.outcome or "interrupted"
        traffic = self._traffic
        traffic.requests = [request for _, request in requests]
        traffic.cancels = sorted((at_ps, places[handle]) for at_ps, handle in self._cancels)
        first_ps = requests[0][1].asked.sequence.arrived_ps
        last_ps = max(request.live.finished_ps or first_ps for _, request in requests)
        attached_ps = min(change.at_ps for change in traffic.changes)
        traffic.start_ps = min(first_ps, attached_ps) if traffic.settings.faults else first_ps
        # Places of one kind are neighbours, as workers of one group are.
        order = sorted(range(len(traffic.kinds)), key=lambda place: traffic.kinds.index(traffic.kinds[place]))
        traffic.kinds = [traffic.kinds[place] for place in order]
        traffic.changes = [
            replace(change, place=order.index(change.place))
            for change in sorted(traffic.changes, key=lambda change: change.at_ps)
            if change.at_ps < last_ps or change.kind == "attached"
        ]

    # --- requests ---------------------------------------------------------------------------------------------------

    def _request(self, line: Record) -> None:
        adapter: Adapter | None = None
        if "adapter_id" in line:
            adapter = self._adapters.get(line["adapter_id"])
            if (own := line.get("adapter")) is not None:
                adapter = self._make_adapter(line["adapter_id"], own["rank"], own["version"])
            elif adapter is None:
                raise KeyError(line["adapter_id"])
        if "prompt_token_ids" in line:
            line["prompt_token_ids"] = array("I", line["prompt_token_ids"])
        asked = ReplayedRequest.read(line, adapter)
        ending = asked.device(self._traffic.answers).ending
        sequence = asked.sequence
        live = SimulatedRequest(
            sequence.handle, sequence.prompt_tokens, sequence.max_new_tokens, sequence.arrived_ps, ending, adapter
        )
        live.sequence = sequence
        self._requests[sequence.handle] = RecordedRequest(line.get("request_id", ""), asked, ending, live)

    def _cancel(self, line: Record) -> None:
        handle, at_ps = line["handle"], line["at_ps"]
        request = self._requests[handle]
        cause = CancelCause.named(line["cause"]) if "cause" in line else CancelCause.CLIENT_LEFT
        kept = line.get("kept_tokens")
        if cause is CancelCause.DEADLINE:
            self._deadlines.add(handle)
        if cause.finish is not None and kept:
            if kept < request.ending.output_tokens:
                request.ending = Ending(kept, cause.finish)
        else:
            self._cancels.append((at_ps, handle))
        if "worker" not in line:  # it was not placed yet
            self._ended(handle, at_ps, "finished" if cause.finish is not None else "cancelled")

    def _refused(self, line: Record) -> None:
        if (handle := line.get("handle")) is None:
            self._traffic.left_out["refused"] += 1  # their lengths are not known
            return
        reason = RefusalReason[line["reason"].upper()]
        self._ended(handle, line["at_ps"], OUTCOME_OF_REFUSAL[reason])

    def _ended(self, handle: int, at_ps: int, outcome: str) -> SimulatedRequest:
        live = self._requests[handle].live
        if outcome == "cancelled" and handle in self._deadlines:
            outcome = "timed out"
        live.outcome, live.finished_ps = outcome, at_ps
        return live

    # --- what happened ----------------------------------------------------------------------------------------------

    def _steps(self, line: Record) -> None:
        worker, spans_ps = self._workers[line["worker"]], line["durations_ps"]
        for index, gap_ps in line.get("gaps_ps", ()):
            spans_ps[index] += gap_ps
        ends_ps = list(accumulate(spans_ps, initial=line["start_ps"]))
        num_before = len(worker.steps_ps)
        if self._is_static:
            worker.steps_ps.extend(ends_ps[1:])
        for index, said in line.get("events", ()):
            self._events(said, ends_ps[index + 1], worker, ends_ps[index], num_before + index)

    def _events(self, said: Record, at_ps: int, worker: _Worker, before_ps: int = 0, step: int = 0) -> None:
        """Take what a decision or a step's end says.

        Args:
            said: by kind; other entries are ignored.
            at_ps: time of the decision, or end of the step.
            worker: whose.
            before_ps: end of the step before.
            step: number of the step.
        """
        for kind, found in said.items():
            match kind:
                case "admitted":
                    for handle, cached_tokens in found:
                        sequence = self._requests[handle].asked.sequence
                        sequence.admitted_ps = at_ps
                        if sequence.first_admitted_ps is None:
                            sequence.first_admitted_ps, sequence.first_cached_tokens = at_ps, cached_tokens
                case "first_tokens":
                    for handle in found:
                        self._requests[handle].asked.sequence.first_token_ps = at_ps
                        if self._is_static:
                            worker.first_steps[handle] = step
                case "preempted":
                    for handle, _ in found:
                        self._requests[handle].asked.sequence.num_requeues += 1
                case "dropped":
                    for handle, why in found:
                        refusal = dropped(self._requests[handle].asked.sequence, DropReason(why))
                        self._ended(handle, at_ps, OUTCOME_OF_REFUSAL[refusal.reason]).worker = worker.name
                case "failed" | "cancelled":
                    for handle in found:
                        self._ended(handle, at_ps, kind).worker = worker.name
        if "finished" in said:  # after the first tokens of the same step
            for (handle, reason, tokens), phases in zip_longest(said["finished"], said.get("phases", ())):
                self._finished(self._ended(handle, at_ps, "finished"), reason, tokens, phases, before_ps, worker)

    def _finished(
        self,
        live: SimulatedRequest,
        reason: str,
        tokens: int,
        phases: list[int] | None,
        before_ps: int,
        worker: _Worker,
    ) -> None:
        live.reason, live.output_tokens, live.worker = _REASONS[reason], tokens, worker.name
        first_step = worker.first_steps.pop(live.handle, None)
        if live.ending.extra_step:
            live.last_token_ps = before_ps
        elif worker.holds and first_step is not None:
            live.last_token_ps = worker.steps_ps[first_step + tokens - 1]
        sequence = live.sequence
        if phases is not None and sequence.first_token_ps is not None and sequence.first_admitted_ps is not None:
            # The two waits for the adapter that `phases` adds up.
            in_prefill_ps = sequence.first_token_ps - sequence.first_admitted_ps - phases[2]
            sequence.prefill_load_ps = max(0, in_prefill_ps)
            sequence.queue_load_ps = max(0, phases[1] - sequence.prefill_load_ps)

    # --- workers ----------------------------------------------------------------------------------------------------

    def _attached(self, line: Record) -> None:
        kinds, kind = self._traffic.kinds, announced(line["hello"])
        place = next((place for place in self._free if kinds[place] == kind), None)
        if place is None:
            place = len(kinds)
            kinds.append(kind)
        else:
            self._free.remove(place)
        self._workers[line["worker"]] = _Worker(line["hello"]["worker_id"], place)
        self._traffic.changes.append(WorkerChange(line["at_ps"], place, "attached"))

    def _gone(self, line: Record) -> None:
        worker = self._workers[line["worker"]]
        self._events(line, line["at_ps"], worker)
        for handle, _ in line["requeued"]:
            sequence = self._requests[handle].asked.sequence
            sequence.num_requeues += line["type"] == "lost" and sequence.admitted_ps is not None
        self._traffic.changes.append(WorkerChange(line["at_ps"], worker.place, line["type"]))
        if line["type"] == "lost":
            self._free.append(worker.place)
