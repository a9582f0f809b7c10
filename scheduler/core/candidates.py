"""What placements see of a worker: figures, and no way to what only the device may know.

A scheduler that keeps a journal notes which of the figures a placement read, so that its choice can be derived again
(`simulator.placements`).
"""

from collections.abc import Callable

from lorrery.scheduler.core.forecast import Forecast, OutputShare, finish_ps
from lorrery.scheduler.core.load_order import LoadOrder
from lorrery.scheduler.core.placements.base import Candidate
from lorrery.scheduler.core.prefix_cache.base import usable_tokens
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.worker.device.pace import Pace

NO_FORECAST = Forecast(None, OutputShare())
"""Of workers whose placement does not ask for it; nothing is noted in it."""

Figures = dict[str, int]
"""The figures of one candidate by name, as far as they were read; a truth value counts as 0 or 1."""


class ReplicaCandidate:
    """The figures of an attached worker's replica, as it is now.

    Attributes:
        name: the worker's id; the same for as long as it is attached.
        forecast: what is known of its time.
        uncommitted_steps: decode steps that have ended and are not committed yet; `kv_tokens` counts them. A driver
            that commits a plan in one go, as the simulator does, sets it before a placement looks.
        before_look: called before it gives what changes with each step; None: it is up to date.
        load_order: of all workers, where it is one of many.
    """

    __slots__ = ("_replica", "before_look", "forecast", "load_order", "name", "uncommitted_steps")

    def __init__(self, name: str, replica: Replica, forecast: Forecast = NO_FORECAST) -> None:
        self.name = name
        self.forecast = forecast
        self.uncommitted_steps = 0
        self.before_look: Callable[[], None] | None = None
        self.load_order: LoadOrder | None = None
        self._replica = replica

    @property
    def num_waiting(self) -> int:
        """Sequences in its queue."""
        return self._replica.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences in its batch."""
        return self._replica.running.num

    @property
    def load(self) -> int:
        """Sequences it has, waiting and running."""
        return self._replica.num_waiting + self._replica.running.num

    @property
    def kv_tokens(self) -> int:
        """Tokens that the sequences of its batch hold."""
        if self.before_look is not None:
            self.before_look()
        running = self._replica.running
        return running.kv_tokens + self.uncommitted_steps * running.num_decoding

    def has_adapter(self, adapter: Adapter) -> bool:
        """Tell whether an adapter is on its GPU in this version, usable now."""
        return adapter.key in self._replica.resident_adapters

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of the sequence's input its prefix cache holds, and may be used."""
        if self.before_look is not None:
            self.before_look()
        return usable_tokens(self._replica.prefix_cache, sequence, 1)

    @property
    def is_blocked(self) -> bool:
        """Whether one that waits, if any does, could not start when it was tried."""
        return self._replica.is_blocked

    def load_ps(self, adapter: Adapter) -> int:
        """Return how long the load of an adapter takes, by itself: 0 if it is there, half if it is under way."""
        return self._replica.adapters.load_ps(adapter)

    @property
    def pace(self) -> Pace:
        """What its steps take, as announced."""
        return self.forecast.pace

    @property
    def slowdown(self) -> int:
        """What its last steps took, in thousandths of what its pace says."""
        return self.forecast.slowdown

    @property
    def usual_slowdown(self) -> int:
        """The same for all its steps."""
        return self.forecast.usual_slowdown

    @property
    def prompt_share(self) -> int:
        """Share of its last steps' time in which running sequences waited for prompts, in thousandths."""
        return self.forecast.prompt_share

    @property
    def waiting_tokens(self) -> int:
        """Input tokens of the sequences in its queue."""
        return self.forecast.waiting_tokens

    @property
    def output_ratio(self) -> int:
        """How much of what they may produce requests do produce lately, in thousandths."""
        return self.forecast.outputs.ratio

    def finish_ps(self, sequence: Sequence, output_tokens: int) -> int:
        """Return how long after now a sequence with so much output would end there; from the figures above, at once."""
        if self.before_look is not None:
            self.before_look()
        replica, forecast, adapter = self._replica, self.forecast, sequence.adapter
        running, num_waiting = replica.running, replica.num_waiting
        return finish_ps(
            forecast.pace,
            running.num,
            num_waiting,
            forecast.waiting_tokens,
            running.kv_tokens + self.uncommitted_steps * running.num_decoding,
            sequence.input_tokens,
            usable_tokens(replica.prefix_cache, sequence, 1),
            output_tokens,
            forecast.prompt_share,
            replica.is_blocked,
            0 if adapter is None else replica.adapters.load_ps(adapter),
        )


class WatchedCandidate:
    """A candidate that notes which of its figures are read.

    Attributes:
        read: the figures, as they were when read last.
    """

    __slots__ = ("_candidate", "name", "read")

    def __init__(self, candidate: Candidate) -> None:
        self.name = candidate.name
        self.read: Figures = {}
        self._candidate = candidate

    @property
    def num_waiting(self) -> int:
        """See `Candidate`."""
        return self._note("num_waiting", self._candidate.num_waiting)

    @property
    def num_running(self) -> int:
        """See `Candidate`."""
        return self._note("num_running", self._candidate.num_running)

    @property
    def load(self) -> int:
        """See `Candidate`."""
        return self._note("load", self._candidate.load)

    @property
    def kv_tokens(self) -> int:
        """See `Candidate`."""
        return self._note("kv_tokens", self._candidate.kv_tokens)

    def has_adapter(self, adapter: Adapter) -> bool:
        """See `Candidate`; of several adapters each has a figure of its own."""
        return bool(self._note(f"has_adapter {adapter.key}", int(self._candidate.has_adapter(adapter))))

    def cached_tokens(self, sequence: Sequence) -> int:
        """See `Candidate`; asked of the sequence that is to be placed."""
        return self._note("cached_tokens", self._candidate.cached_tokens(sequence))

    @property
    def is_blocked(self) -> bool:
        """See `Candidate`."""
        return bool(self._note("is_blocked", int(self._candidate.is_blocked)))

    def load_ps(self, adapter: Adapter) -> int:
        """See `Candidate`; asked of the adapter of the sequence that is to be placed."""
        return self._note("load_ps", self._candidate.load_ps(adapter))

    @property
    def pace(self) -> Pace:
        """See `Candidate`."""
        pace = self._candidate.pace
        for name, value in zip(Pace._fields, pace, strict=True):
            self._note(name, value)
        return pace

    @property
    def slowdown(self) -> int:
        """See `Candidate`."""
        return self._note("slowdown", self._candidate.slowdown)

    @property
    def usual_slowdown(self) -> int:
        """See `Candidate`."""
        return self._note("usual_slowdown", self._candidate.usual_slowdown)

    @property
    def prompt_share(self) -> int:
        """See `Candidate`."""
        return self._note("prompt_share", self._candidate.prompt_share)

    @property
    def waiting_tokens(self) -> int:
        """See `Candidate`."""
        return self._note("waiting_tokens", self._candidate.waiting_tokens)

    @property
    def output_ratio(self) -> int:
        """See `Candidate`."""
        return self._note("output_ratio", self._candidate.output_ratio)

    def _note(self, name: str, value: int) -> int:
        self.read[name] = value
        return value
