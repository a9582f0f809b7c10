"""A candidate that records which of its figures are read.

A scheduler that keeps a journal records what a placement read, so that its choice can be derived again
(`simulator.placements`).
"""

from lorrery.scheduler.core.placements.candidate import Candidate
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.worker.device.pace import Pace

Figures = dict[str, int]
"""The figures of one candidate by name, as far as they were read; booleans count as 0 or 1."""


class WatchedCandidate(Candidate):
    """See the module.

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
