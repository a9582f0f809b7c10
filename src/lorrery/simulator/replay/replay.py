"""Runs a journal's inputs through the same core and mock GPU under a virtual clock, and compares the results.

The simulation takes the inputs named in `simulator.replay.journal`, and applies each at the first boundary at or after
its stamp. It computes every plan and step itself and compares each at once, to the picosecond, with the journal of the
live cluster. It stops at the first difference, since later ones would follow from it.

Workers interact only where a request moves from one to another, so each is run up to the time of its next input.
"""

from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.subscribers.record import Record
from lorrery.service.faults.kinds import parse_fault
from lorrery.simulator.replay.journal import Journal, Line
from lorrery.simulator.replay.parts import (
    DifferenceError,
    NotReadError,
    Replayed,
    ReplayedRequest,
    ReplayParts,
    compare,
    derive,
)
from lorrery.simulator.replay.worker import ReplayWorker


def replay(journal: Journal, parts: ReplayParts) -> Replayed:
    """Replay a journal."""
    return _Replay(journal, parts).run()


class _Replay:
    def __init__(self, journal: Journal, parts: ReplayParts) -> None:
        self._journal, self._parts = journal, parts
        self._adapters = dict(parts.adapters)
        self._requests: dict[int, ReplayedRequest] = {}
        self._workers: list[ReplayWorker] = []
        self._faults_from_ps: int | None = None
        self._result = Replayed()
        self._line = 1

    def run(self) -> Replayed:
        try:
            for line in self._journal.inputs:
                self._line = line.number
                self._take(line)
            for worker in self._workers:
                worker.run_to_stop()
        except DifferenceError as difference:
            self._result.differences = [(difference.line, what) for what in difference.whats]
        except (LookupError, ValueError, TypeError, AssertionError) as error:
            # No live run can have had these inputs: the core or the device rejects them.
            self._result.differences = [(self._line, f"cannot be: {type(error).__name__}: {error}")]
        return self._result

    def _take(self, line: Line) -> None:
        content = line.content
        match line.type:
            case "request":
                self._result.num_requests += 1
                request = ReplayedRequest.read(content, self._adapter(content))
                self._requests[request.sequence.handle] = request
            case "placed":
                self._result.num_placed += 1
                request = self._requests[content["handle"]]
                if self._journal.notes_figures:
                    self._place(line, request.sequence)
                self._worker(content).give(content, request)
            case "cancel":
                self._result.num_cancels += 1
                self._requests[content["handle"]].cancelled(content)
                if "worker" in content:
                    self._worker(content).give(content, None)
            case "recall" | "retire" | "load":
                self._worker(content).give(content, None)
            case "faults":
                faults = [parse_fault(rule) for rule in content["rules"]]
                if "worker" in content:
                    self._worker(content).take_faults(faults, content["at_ps"], add="add" in content)
                else:
                    self._parts.faults.take(faults, content["at_ps"], add="add" in content)
            case "attached":
                self._result.num_workers += 1
                self._attach(content["worker"], content["hello"], content["at_ps"])
            case "drained" | "lost":
                self._result.num_lost += line.type == "lost"
                self._worker(content).give_back(line)
            case "adapter" if not self._journal.has_versions:
                name, rank = content["adapter_id"], content["rank"]
                self._adapters[name] = self._parts.make_adapter(name, rank, 0)
            case "adapter_removed" if not self._journal.has_versions:
                del self._adapters[content["adapter_id"]]
            case "refused" if "candidates" in content:
                self._raise(line, self._requests[content["handle"]].sequence)
            case _:  # other refusals leave no trace, and requests state their adapter's version
                pass

    def _adapter(self, request: Record) -> Adapter | None:
        if "adapter_id" not in request:
            return None
        if "adapter" in request:
            return self._parts.make_adapter(
                request["adapter_id"], request["adapter"]["rank"], request["adapter"]["version"]
            )
        return self._adapters[request["adapter_id"]]

    def _place(self, line: Line, sequence: Sequence) -> None:
        """Derive a request's worker and the candidates of the choice; the target of a move is an input."""
        content = line.content
        if "moved_from" in content:
            for worker in self._workers:
                if worker.member.name == content["moved_from"]:
                    worker.run_to_line(line.number)  # it may have been preempted before it left
        ready, fitting = self._fitting(sequence)
        if "moved_from" in content:
            name = self._worker(content).member.name
            compare(line.number, "placed", {"could take it": name in fitting}, {"could take it": True})
            return
        figures = content.get("candidates", {})
        candidates = fitting if ready > 1 else []
        compare(line.number, "placed", {"candidates": candidates}, {"candidates": list(figures)})
        if figures:
            self._result.num_derived += 1
            try:
                fitting = [derive(self._parts.placement, sequence, figures)]
            except NotReadError as error:
                raise DifferenceError(line.number, f"placed: the placement {error}") from None
        live = self._worker(content).member.name
        compare(line.number, "placed", {"worker": fitting[0]}, {"worker": live})

    def _raise(self, line: Line, sequence: Sequence) -> None:
        """Derive that the placement raises, as it did live."""
        figures = line.content["candidates"]
        _, fitting = self._fitting(sequence)
        compare(line.number, "refused", {"candidates": fitting}, {"candidates": list(figures)})
        try:
            name = derive(self._parts.placement, sequence, figures)
        except NotReadError as error:
            raise DifferenceError(line.number, f"refused: the placement {error}") from None
        except Exception:
            self._result.num_derived += 1
        else:
            raise DifferenceError(line.number, f"refused: the placement chooses {name} simulated, raised live")

    def _fitting(self, sequence: Sequence) -> tuple[int, list[str]]:
        """Return how many workers accept new requests, and the names of those that could hold this sequence."""
        ready = [worker.member for worker in self._workers if worker.is_ready]
        return len(ready), [member.name for member in ready if member.replica.never_fits_reason(sequence) is None]

    def _attach(self, number: int, hello: Record, at_ps: int) -> None:
        lines = self._journal.workers[number]
        parts = self._parts
        if self._faults_from_ps is None:
            self._faults_from_ps = at_ps
        member = Member(hello["worker_id"], parts.make_replica(hello, self._faults_from_ps))
        faults = parts.planned(self._faults_from_ps)
        self._workers.append(
            ReplayWorker(lines, member, parts.make_gpu(hello), faults, self._requests, parts, self._result)
        )

    def _worker(self, content: Record) -> ReplayWorker:
        return self._workers[content["worker"]]
