"""The points left for one sweep: those that no other sweep of its folder has run or is running."""

from collections.abc import Iterator, Mapping

from lorrery.simulator.sweep.claims import Claims
from lorrery.simulator.sweep.outcome import Outcome
from lorrery.simulator.sweep.points import Point
from lorrery.simulator.sweep.store import PointStore

__all__ = ["Share"]


class Share:
    """See the module.

    Args:
        points: without an outcome yet, by key.
        store: of finished points, shared by all sweeps of the folder.
        claims: to points.
    """

    def __init__(self, points: Mapping[str, Point], store: PointStore, claims: Claims) -> None:
        self._open = dict(points)
        self._store = store
        self._claims = claims
        self._found: list[Outcome] = []

    @property
    def is_open(self) -> bool:
        """Whether some points have no outcome yet."""
        return bool(self._open)

    def take(self) -> Iterator[Point]:
        """Yield points to run, each claimed when requested; points of other sweeps are skipped for now."""
        for key, point in list(self._open.items()):
            # Check twice: the holder may have written and then released it between a check and the claim.
            if self._look(key, point):
                continue
            if self._claims.claim(key):
                if self._look(key, point):
                    self._claims.release(key)
                else:
                    yield point

    def _look(self, key: str, point: Point) -> bool:
        outcome = self._store.read(point)
        if outcome is None and (error := self._claims.failure(key)) is not None:
            outcome = Outcome(key, error=error)
        if outcome is not None:
            self._found.append(outcome)
        return outcome is not None

    def found(self) -> list[Outcome]:
        """Return what other sweeps have finished since the last call."""
        found, self._found = self._found, []
        for outcome in found:
            del self._open[outcome.key]
        return found

    def finish(self, outcome: Outcome) -> None:
        """Store the outcome of a point from `take`."""
        point = self._open.pop(outcome.key)
        if outcome.figures is not None:
            self._store.write(point, outcome)
        self._claims.release(outcome.key, outcome.error)
