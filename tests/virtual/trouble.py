"""What goes wrong in a run: at times of its own, and at moments of the services' own doing.

Two events that are drawn independently seldom meet. So when a request moves, a worker is lost or drains, a router loses
its scheduler or a client cancels, one more thing may go wrong within a message's time of it, to those it concerns.
"""

import random
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import Any

import pytest

from lorrery.router.session import Session
from lorrery.router.shard import Shard
from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.core.cluster_facts import GaveBack, Withdrawn
from lorrery.scheduler.workers import Dispatcher
from tests.virtual.clients import Clients
from tests.virtual.clock import VirtualLoop
from tests.virtual.network import Network
from tests.virtual.processes import Process

MAX_AT_MOMENTS = 12
"""So many things go wrong at moments in a run: those bring moments of their own."""


class Trouble:
    """See the module.

    Args:
        loop: everybody's.
        network: theirs.
        rng: of the run.
        clients: may cancel.
        processes: may fail.
        note: puts a line into the timeline.

    Attributes:
        calm: whether only clients do unforeseen things.
        over: whether nothing goes wrong any more.
        order_is_lost: whether a scheduler's clock has gone back, so that a cancel may be older than its request.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        rng: random.Random,
        clients: Clients,
        processes: list[Process],
        note: Callable[..., None],
    ) -> None:
        self.calm = False
        self.over = False
        self.order_is_lost = False
        self._loop, self._network, self._rng, self._clients = loop, network, rng, clients
        self._processes, self._note = processes, note
        self._num_at_moments = 0

    def later(self, seconds: float, what: Callable[..., Any], *arguments: Any) -> None:
        """Let something happen, on no host."""
        self._loop.call_later(seconds, what, *arguments, context=Context())

    # --- at times of its own ----------------------------------------------------------------------------------------

    def happen(self) -> None:
        """Let something go wrong somewhere."""
        kind = self._rng.choice(["cut", "cut", "cut", "kill", "kill", "drain", "stop", "clock", "wall"])
        self.let(kind, self._rng.choice(self._processes))

    def let(self, kind: str, process: Process) -> None:
        """Let something go wrong with a process; a cut concerns any connection."""
        rng = self._rng
        if (not process.runs and kind != "cut") or self.over:
            return
        if kind == "cut":
            calls = self._network.between("Route", "Attach", "RegisterAdapter", "UnregisterAdapter")
            if calls:
                self._cut(rng.choice(calls))
            return
        self._note("fault:", kind, process.name)
        if kind == "kill":
            process.kill()
            self.later(rng.choice([0.01, 0.5, 2.0]) * rng.random(), self._begin_again, process)
        elif kind == "drain":
            process.terminate()
        elif kind == "stop":
            process.host.stop(rng.choice([0.2, 1.0, 4.0]) * rng.random())
        elif kind == "clock":
            seconds = rng.choice([-10.0, -0.5, 0.5, 10.0])
            process.host.jump(seconds)
            self.order_is_lost = self.order_is_lost or (seconds < 0 and process.kind == "scheduler")
        else:
            process.host.jump_wall(rng.choice([-3600.0, 3600.0]))

    def _cut(self, call: Any) -> None:
        self._note("breaks:", call.method.name, "of", "" if call.client is None else call.client.name)
        slow = self._rng.choice([0.001, 0.1, 3.0])
        call.cut(self._rng.random() * slow, self._rng.random() * slow)

    def _begin_again(self, process: Process) -> None:
        if not process.runs:
            self._note("begins:", process.name)
            process.begin()

    # --- at moments -------------------------------------------------------------------------------------------------

    def moment(self, what: str, request_ids: Iterable[str], names: Iterable[str]) -> None:
        """One more thing may go wrong: with one of these requests, or of these processes."""
        rng = self._rng
        if self.over or self._num_at_moments >= MAX_AT_MOMENTS or rng.random() > 0.5:
            return
        self._num_at_moments += 1
        ids = sorted(request_ids)
        mine = [request for request in self._clients.requests if request.call_id in ids and not request.over]
        processes = [process for process in self._processes if process.name in set(names) and process.runs]
        seconds = self._network.delay(rng) * rng.choice([0.0, 0.5, 1.0, 2.0])
        if mine and (self.calm or not processes or rng.random() < 0.5):
            request = rng.choice(mine)
            self._note("at the moment:", what, "cancel", request.number, f"in {seconds:.4f} s")
            self.later(seconds, self._clients.cancel, request)
        elif processes and not self.calm:
            process, kind = rng.choice(processes), rng.choice(["kill", "kill", "drain", "cut one", "stop"])
            self._note("at the moment:", what, kind, process.name, f"in {seconds:.4f} s")
            self.later(
                seconds,
                self._cut_one if kind == "cut one" else self.let,
                *((process,) if kind == "cut one" else (kind, process)),
            )

    def _cut_one(self, process: Process) -> None:
        calls = [
            call
            for call in self._network.between("Route", "Attach")
            if process.host in (call.client, None if call.server is None else call.server.host)
        ]
        if calls and not self.over:
            self._cut(self._rng.choice(calls))

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Hear of the moments."""
        before(patch, Dispatcher, "recalled", self._recalled)
        before(patch, Dispatcher, "withdrawn", self._withdrawn)
        before(patch, Dispatcher, "lost", self._gave_back("lost"))
        before(patch, Dispatcher, "drained", self._gave_back("drained"))
        before(patch, Shard, "_end", self._shard_lost)

    def _recalled(self, worker: Dispatcher, handle: int, to: str, _at_ps: int) -> None:
        ids = _request_ids(worker, [handle])
        self.moment("recalled", ids, [worker.worker_id, to, to])

    def _withdrawn(self, worker: Dispatcher, event: Withdrawn, _at_ps: int) -> None:
        self.moment("withdrawn", _request_ids(worker, [event.sequence.handle]), [worker.worker_id])

    def _gave_back(self, what: str) -> Callable[..., None]:
        def heard(worker: Dispatcher, gave_back: GaveBack, _at_ps: int) -> None:
            if gave_back.sequences:
                ids = _request_ids(worker, [sequence.handle for sequence in gave_back.sequences])
                others = [process.name for process in self._processes if process.kind == "worker"]
                self.moment(what, ids, others)

        return heard

    def _shard_lost(self, _shard: Shard, session: Session) -> None:
        ids = [one.request.request_id for one in session.fanout.open_requests.values()]
        if ids:
            self.moment("shard lost", ids, [one.name for one in self._processes if one.kind != "worker"])


def _request_ids(worker: Dispatcher, handles: Iterable[int]) -> list[str]:
    cluster: Cluster = worker._cluster  # type: ignore[assignment]
    lives = cluster.requests.lives
    return [lives[handle].request_id for handle in handles if handle in lives]


def before(patch: pytest.MonkeyPatch, owner: type, name: str, say: Callable[..., None]) -> None:
    """Let a method say something each time before it does what it does."""
    original = getattr(owner, name)

    def saying(self: Any, *arguments: Any) -> Any:
        say(self, *arguments)
        return original(self, *arguments)

    patch.setattr(owner, name, saying)
