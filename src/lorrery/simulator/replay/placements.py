"""Re-derives a live placement's choice from the figures that it read, as noted in the journal.

A scheduler's view of its workers depends on which messages have arrived, so the figures are inputs. The choice is
derived: it follows from them, from the placement's earlier choices, and from its seed.
"""

from collections.abc import Mapping

from lorrery.scheduler.core.placements.base import Candidate
from lorrery.scheduler.core.placements.candidate import Figures
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.worker.device.steptime import Pace


class NotReadError(Exception):
    """A placement reads a figure that it did not read live."""


class RecordedCandidate(Candidate):
    """A worker's figures as recorded in a journal."""

    def __init__(self, name: str, figures: Figures) -> None:
        super().__init__(name)
        self._figures = figures

    @property
    def num_waiting(self) -> int:
        """See `Candidate`."""
        return self._figure("num_waiting")

    @property
    def num_running(self) -> int:
        """See `Candidate`."""
        return self._figure("num_running")

    @property
    def load(self) -> int:
        """See `Candidate`."""
        return self._figure("load")

    @property
    def kv_tokens(self) -> int:
        """See `Candidate`."""
        return self._figure("kv_tokens")

    def has_adapter(self, adapter: Adapter) -> bool:
        """See `Candidate`."""
        return bool(self._figure(f"has_adapter {adapter.key}"))

    def cached_tokens(self, sequence: Sequence) -> int:
        """See `Candidate`."""
        del sequence
        return self._figure("cached_tokens")

    @property
    def is_blocked(self) -> bool:
        """See `Candidate`."""
        return bool(self._figure("is_blocked"))

    def load_ps(self, adapter: Adapter) -> int:
        """See `Candidate`."""
        del adapter
        return self._figure("load_ps")

    @property
    def pace(self) -> Pace:
        """See `Candidate`."""
        return Pace(*(self._figure(name) for name in Pace._fields))

    @property
    def slowdown(self) -> int:
        """See `Candidate`."""
        return self._figure("slowdown")

    @property
    def usual_slowdown(self) -> int:
        """See `Candidate`."""
        return self._figure("usual_slowdown")

    @property
    def prompt_share(self) -> int:
        """See `Candidate`."""
        return self._figure("prompt_share")

    @property
    def waiting_tokens(self) -> int:
        """See `Candidate`."""
        return self._figure("waiting_tokens")

    @property
    def output_ratio(self) -> int:
        """See `Candidate`."""
        return self._figure("output_ratio")

    def _figure(self, name: str) -> int:
        if name not in self._figures:
            raise NotReadError(f"reads {name} of {self.name} simulated, did not live")
        return self._figures[name]


def derive(placement: Placement, sequence: Sequence, figures: Mapping[str, Figures]) -> str:
    """Return the name of the worker that the placement chooses.

    Args:
        placement: in its state after the previous choice.
        sequence: to be placed.
        figures: of each candidate, by name in order of attaching.

    Raises:
        NotReadError: it reads a figure that it did not read live.
        Exception: whatever the placement raises.
    """
    candidates: list[Candidate] = [RecordedCandidate(name, read) for name, read in figures.items()]
    return candidates[candidates.index(placement.place(sequence, candidates).candidate)].name
