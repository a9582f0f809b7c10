"""What a placement rule sees of a worker: figures, without access to what only the device may know."""

from collections.abc import Callable
from typing import Final

from lorrery.scheduler.core.placements.forecast import Forecast, OutputShare, finish_ps
from lorrery.scheduler.core.prefix_cache.base import usable_tokens
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.worker.device.steptime import Pace

PREDICTED: Final = ("pace", "slowdown", "usual_slowdown", "prompt_share", "waiting_tokens", "output_ratio")
"""Figures that are kept only for a placement that predicts."""


def not_kept(name: str) -> AttributeError:
    """Return the error for reading one of them in a placement that does not declare that it predicts."""
    return AttributeError(f"{name} is kept only for a placement that predicts; give its class `predicts = True`")


@mypyc_attr(allow_interpreted_subclasses=True)
class Candidate:
    """A worker that could take the sequence: current figures, computed when read.

    A base class and not a protocol, so that compiled code reads them without a lookup: any other candidate derives from
    it. Not abstract by `abc`: mypyc gives the instances of such a class weak references that outlive them.

    Attributes:
        name: the worker's id; the same for as long as it is attached.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def num_waiting(self) -> int:
        """Sequences in its queue."""
        raise NotImplementedError

    @property
    def num_running(self) -> int:
        """Sequences in its batch, those in prefill included."""
        raise NotImplementedError

    @property
    def load(self) -> int:
        """Sequences it has, waiting and running."""
        raise NotImplementedError

    @property
    def kv_tokens(self) -> int:
        """Tokens that the sequences of its batch hold."""
        raise NotImplementedError

    def has_adapter(self, adapter: Adapter) -> bool:
        """Return whether an adapter is on its GPU in this version, usable now."""
        raise NotImplementedError

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of the sequence's input its prefix cache holds. Cost: one look-up."""
        raise NotImplementedError

    @property
    def is_blocked(self) -> bool:
        """Whether its waiting sequences, if any, could not start when they were tried."""
        raise NotImplementedError

    def load_ps(self, adapter: Adapter) -> int:
        """Return how long the load of an adapter takes there alone: 0 if it is on the GPU, half if it is loading."""
        raise NotImplementedError

    @property
    def pace(self) -> Pace:
        """Its step times as announced; see `core.placements.forecast` for this and what follows."""
        raise NotImplementedError

    @property
    def slowdown(self) -> int:
        """Duration of its last steps, in thousandths of what its pace says."""
        raise NotImplementedError

    @property
    def usual_slowdown(self) -> int:
        """Duration of all its steps so far, in thousandths of what its pace says."""
        raise NotImplementedError

    @property
    def prompt_share(self) -> int:
        """Share of its last steps' time in which running sequences waited for prompts, in thousandths."""
        raise NotImplementedError

    @property
    def waiting_tokens(self) -> int:
        """Input tokens of the sequences in its queue."""
        raise NotImplementedError

    @property
    def output_ratio(self) -> int:
        """Recent ratio of produced to allowed output tokens, in thousandths; the same for all workers."""
        raise NotImplementedError


Figures = dict[str, int]
"""The figures of one candidate by name, as far as they were read; booleans count as 0 or 1."""


class WatchedCandidate(Candidate):
    """A candidate that records which of its figures are read.

    A scheduler that keeps a journal records what a placement read, so that its choice can be derived again
    (`simulator.replay.parts`).

    Attributes:
        read: the figures, with the values last read.
    """

    __slots__ = ("_candidate", "read")

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate.name)
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
        """See `Candidate`; each adapter has a figure of its own."""
        return bool(self._note(f"has_adapter {adapter.key}", int(self._candidate.has_adapter(adapter))))

    def cached_tokens(self, sequence: Sequence) -> int:
        """See `Candidate`; called with the sequence that is to be placed."""
        return self._note("cached_tokens", self._candidate.cached_tokens(sequence))

    @property
    def is_blocked(self) -> bool:
        """See `Candidate`."""
        return bool(self._note("is_blocked", int(self._candidate.is_blocked)))

    def load_ps(self, adapter: Adapter) -> int:
        """See `Candidate`; called with the adapter of the sequence that is to be placed."""
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


NO_FORECAST = Forecast(None, OutputShare())
"""For workers whose placement does not need a forecast; nothing is recorded in it."""


class ReplicaCandidate(Candidate):
    """The current figures of an attached worker's replica.

    Attributes:
        forecast: its step times and waiting tokens.
        uncommitted_steps: decode steps that have ended and are not committed yet; `kv_tokens` counts them. A driver
            that commits a plan in one go, as the simulator does, sets it before a placement reads.
        before_look: called before a figure is read that changes with each step; None: figures are up to date.
        table: the `WorkerTable` that placements read instead of it, if any.
    """

    __slots__ = ("_replica", "before_look", "forecast", "table", "uncommitted_steps")

    def __init__(self, name: str, replica: Replica, forecast: Forecast = NO_FORECAST) -> None:
        super().__init__(name)
        self.forecast = forecast
        self.uncommitted_steps = 0
        self.before_look: Callable[[], None] | None = None
        self.table: object = None  # untyped, since `WorkerTable` imports candidates
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

    @property
    def least_kv_tokens(self) -> int:
        """`kv_tokens` without steps that have ended and are not committed yet."""
        return self._replica.running.kv_tokens

    @property
    def shown_kv_tokens(self) -> int:
        """`kv_tokens` as of the last time that a placement had it brought up to date."""
        running = self._replica.running
        return running.kv_tokens + self.uncommitted_steps * running.num_decoding

    @property
    def has_prefix_cache(self) -> bool:
        """Whether `cached_tokens` may be more than 0."""
        return self._replica.prefix_cache is not None

    def has_adapter(self, adapter: Adapter) -> bool:
        """Return whether an adapter is on its GPU in this version, usable now."""
        return adapter.key in self._replica.resident_adapters

    def bring_up_to_date(self) -> None:
        """Update the figures that change with each step."""
        if self.before_look is not None:
            self.before_look()

    @property
    def block_cache(self) -> BlockCache | None:
        """Its prefix cache, if that is a block cache; `cached_tokens` then comes from it."""
        cache = self._replica.prefix_cache
        return cache if isinstance(cache, BlockCache) else None

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of the sequence's input its prefix cache holds and may serve."""
        if self.before_look is not None:
            self.before_look()
        return usable_tokens(self._replica.prefix_cache, sequence, 1)

    @property
    def is_blocked(self) -> bool:
        """Whether a waiting sequence, if any, could not start when it was tried."""
        return self._replica.is_blocked

    def load_ps(self, adapter: Adapter) -> int:
        """Return how long the load of an adapter takes alone: 0 if it is on the GPU, half if it is loading."""
        return self._replica.adapters.load_ps(adapter)

    @property
    def pace(self) -> Pace:
        """Its step times as announced."""
        return self._kept("pace").pace

    @property
    def slowdown(self) -> int:
        """Duration of its last steps, in thousandths of what its pace says."""
        return self._kept("slowdown").slowdown

    @property
    def usual_slowdown(self) -> int:
        """Duration of all its steps so far, in thousandths of what its pace says."""
        return self._kept("usual_slowdown").usual_slowdown

    @property
    def prompt_share(self) -> int:
        """Share of its last steps' time in which running sequences waited for prompts, in thousandths."""
        return self._kept("prompt_share").prompt_share

    @property
    def waiting_tokens(self) -> int:
        """Input tokens of the sequences in its queue."""
        return self._kept("waiting_tokens").waiting_tokens

    @property
    def output_ratio(self) -> int:
        """Recent ratio of produced to allowed output tokens, in thousandths."""
        return self._kept("output_ratio").outputs.ratio

    def _kept(self, name: str) -> Forecast:
        if self.forecast is NO_FORECAST:
            raise not_kept(name)
        return self.forecast

    def finish_ps(self, sequence: Sequence, output_tokens: int) -> int:
        """Return how long after now a sequence with this much output would end; from the above figures in one call."""
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
