"""What placements see of a worker: figures, without access to what only the device may know."""

from collections.abc import Callable

from lorrery.scheduler.core.placements.candidate import Candidate, not_kept
from lorrery.scheduler.core.placements.forecast import Forecast, OutputShare, finish_ps
from lorrery.scheduler.core.prefix_cache.base import usable_tokens
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.worker.device.pace import Pace

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
