"""Finds the cheapest cluster that serves a rate within a level, and proves it.

1. Arithmetic says what each shape costs at least (`shapes`).
2. All shapes that the lowest of these bounds, and a quarter more, could pay for are simulated with as many replicas as
   that buys. If none keeps the level, the budget is raised. A run is given up as soon as it is lost.
3. Those that kept it, the ones with most to spare first, have to keep it with the most replicas that cost less than the
   best so far; one that does is made smaller until it fails. So every other shape was seen to fail, or could not cost
   less, if what a number of replicas can do, a larger one can too.
4. The answer is simulated with several seeds, and so is one replica less: N keeps the level and N - 1 does not, in the
   mean over the seeds. Where the interval of a figure holds its limit, the answer says so.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lorrery.simulator.plan.level import Level
from lorrery.simulator.plan.shapes import Shape
from lorrery.simulator.plan.trials import SEED, Trial
from lorrery.vocabulary.intervals import mean_and_margin

__all__ = ["Answer", "Proof", "Rejected", "cheapest"]

Task = tuple[Shape, int, int, bool]
"""A run: shape, replicas, seed, and whether to give up once the level is lost."""
RunAll = Callable[[Sequence[Task]], Iterable[Trial]]
"""Runs tasks, several at a time, and yields what came of them in their order."""

_BUDGETS = (1.25, 1.45, 1.7, 2.0, 2.5, 3.2, 4.0, 6.0, 9.0, 16.0)
"""Over the lowest bound: what is tried in turn, until something keeps the level."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Runs of one number of replicas with several seeds.

    Attributes:
        num_replicas: that served.
        trials: one per seed.
        means: by bound, over the seeds.
        margins: by bound, half the interval in which the mean lies with 95 %; infinite for one seed.
        met: whether the means keep the level.
        is_clear: whether no interval holds a limit that decides.
    """

    num_replicas: int
    trials: Sequence[Trial]
    means: Mapping[str, float]
    margins: Mapping[str, float]
    met: bool
    is_clear: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """A shape that is not the answer.

    Attributes:
        shape: which.
        num_replicas: with which it was tried, or that it needs at least.
        trial: that it lost; None: its bound costs no less than the answer.
    """

    shape: Shape
    num_replicas: int
    trial: Trial | None


@dataclass(slots=True)
class Answer:
    """The cheapest cluster found so far.

    Attributes:
        shape: of a replica; None: no shape kept the level.
        num_replicas: how many.
        rejected: all others, in the order in which they were.
        proofs: of the answer and of one replica less, where there can be one less.
        num_trials: runs.
        finished: whether the search went to its end.
    """

    shape: Shape | None = None
    num_replicas: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    num_trials: int = 0
    finished: bool = False

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return 0 if self.shape is None else self.num_replicas * self.shape.num_gpus

    @property
    def usd_per_hour(self) -> float | None:
        """Of all replicas; None: a price is not known."""
        usd = None if self.shape is None else self.shape.usd_per_hour
        return None if usd is None else self.num_replicas * usd


def cheapest(
    shapes: Sequence[Shape], level: Level, run_all: RunAll, answer: Answer, *, num_seeds: int, at_once: int = 1
) -> None:
    """Search, and keep the best so far in `answer`, so that a caller who interrupts has it.

    Args:
        shapes: to choose from; of equal ones the first is taken.
        level: to keep.
        run_all: simulates; the same task gives the same run.
        answer: to fill.
        num_seeds: of the proof.
        at_once: tasks that `run_all` runs at a time.

    Raises:
        LorreryError: from a run.
    """
    search = _Search(shapes, level, run_all, answer)
    passed = search.screen()
    passed.sort(key=lambda one: max([bound.excess(one[1].figures[bound.name]) for bound in level.bounds]))
    for start in range(0, len(passed), at_once):
        search.refine([shape for shape, _ in passed[start : start + at_once]], first=passed[0])
    if answer.shape is not None:
        search.prove(num_seeds)
    answer.finished = True


class _Search:
    def __init__(self, shapes: Sequence[Shape], level: Level, run_all: RunAll, answer: Answer) -> None:
        self._shapes, self._level, self._run_all, self._answer = shapes, level, run_all, answer
        self._by_usd = all(shape.usd_per_hour is not None for shape in shapes)

    def _unit(self, shape: Shape) -> float:
        """Return what a replica costs: dollars, or GPUs where a price is not known."""
        return shape.usd_per_hour if self._by_usd and shape.usd_per_hour is not None else float(shape.num_gpus)

    def _run(self, tasks: Sequence[tuple[Shape, int]]) -> list[Trial]:
        self._answer.num_trials += len(tasks)
        return list(self._run_all([(shape, number, SEED, True) for shape, number in tasks]))

    def screen(self) -> list[tuple[Shape, Trial]]:
        """Return the shapes that keep the level for a budget at which some do, and how."""
        left = list(self._shapes)
        lowest = min((shape.least * self._unit(shape) for shape in left), default=0.0)
        lost: dict[Shape, Rejected] = {}
        passed: list[tuple[Shape, Trial]] = []
        for factor in _BUDGETS:
            bought = {shape: int(lowest * factor / self._unit(shape) + 1e-9) for shape in left}
            tasks = [(shape, number) for shape, number in bought.items() if number >= shape.least]
            for (shape, number), trial in zip(tasks, self._run(tasks), strict=True):
                if trial.met:
                    passed.append((shape, trial))
                else:
                    lost[shape] = Rejected(shape, number, trial)
                if trial.in_vain:
                    left.remove(shape)
            if passed or not left:
                break
        kept = {shape for shape, _ in passed}
        for shape in self._shapes:
            if shape not in kept:
                self._answer.rejected.append(lost.get(shape) or Rejected(shape, shape.least, None))
        return passed

    def refine(self, shapes: Sequence[Shape], first: tuple[Shape, Trial]) -> None:
        """Try shapes, which keep the level for the budget, with less than the best so far costs."""
        answer = self._answer
        if answer.shape is None:
            answer.shape, trial = first
            answer.num_replicas = self._fewest(answer.shape, trial.num_replicas)
        shapes = [shape for shape in shapes if shape is not answer.shape]
        affordable = {shape: number for shape in shapes if (number := self._affordable(shape)) >= shape.least}
        answer.rejected += [Rejected(shape, shape.least, None) for shape in shapes if shape not in affordable]
        trials = self._run(list(affordable.items()))
        for (shape, number), trial in zip(affordable.items(), trials, strict=True):
            if not trial.met:
                answer.rejected.append(Rejected(shape, number, trial))
                continue
            most = min(number, self._affordable(shape))
            if most < number and (most < shape.least or not self._run([(shape, most)])[0].met):
                answer.rejected.append(Rejected(shape, most, None))
                continue
            answer.rejected.append(Rejected(answer.shape, answer.num_replicas, None))
            answer.shape, answer.num_replicas = shape, self._fewest(shape, most)

    def _affordable(self, shape: Shape) -> int:
        """Return the most replicas of a shape that cost less than the best so far."""
        answer = self._answer
        assert answer.shape is not None
        return math.ceil(answer.num_replicas * self._unit(answer.shape) / self._unit(shape) - 1e-9) - 1

    def _fewest(self, shape: Shape, met: int) -> int:
        """Return the fewest replicas that keep the level, given a number that does."""
        missed = shape.least - 1
        while missed + 1 < met:
            number = (missed + met) // 2
            if self._run([(shape, number)])[0].met:
                met = number
            else:
                missed = number
        return met

    def prove(self, num_seeds: int) -> None:
        """Simulate the answer and one replica less with several seeds; move it where these say otherwise."""
        answer, shape = self._answer, self._answer.shape
        assert shape is not None
        found: dict[int, Proof] = {}

        def simulate(*numbers: int) -> None:
            new = [number for number in numbers if number not in found and number >= least]
            tasks = [(shape, number, SEED + index, False) for number in new for index in range(num_seeds)]
            answer.num_trials += len(tasks)
            trials = list(self._run_all(tasks))
            for place, number in enumerate(new):
                own = trials[place * num_seeds : (place + 1) * num_seeds]
                found[number] = summed_up(number, own, self._level)

        least = len(shape.settings.router.schedulers)
        simulate(answer.num_replicas, answer.num_replicas - 1)
        while not found[answer.num_replicas].met:
            answer.num_replicas += 1
            simulate(answer.num_replicas)
        while answer.num_replicas > least and found[answer.num_replicas - 1].met:
            answer.num_replicas -= 1
            simulate(answer.num_replicas - 1)
        answer.proofs = [
            found[number] for number in sorted(found) if answer.num_replicas - 1 <= number <= answer.num_replicas
        ]


def summed_up(number: int, trials: Sequence[Trial], level: Level) -> Proof:
    """Return means and intervals over the seeds of one number of replicas."""
    means, margins = dict[str, float](), dict[str, float]()
    for bound in level.bounds:
        values = [trial.figures[bound.name] for trial in trials]
        if all(map(math.isfinite, values)):
            means[bound.name], margins[bound.name] = mean_and_margin(values)
        else:  # so many requests failed that the figure of a seed is infinite
            means[bound.name], margins[bound.name] = math.inf, 0.0 if len(trials) > 1 else math.inf
    kept = {bound: bound.holds(means[bound.name]) for bound in level.bounds}
    clear = {bound: abs(means[bound.name] - bound.limit) > margins[bound.name] for bound in level.bounds}
    met = all(kept.values())
    is_clear = all(clear.values()) if met else any(clear[bound] for bound in level.bounds if not kept[bound])
    return Proof(number, trials, means, margins, met, is_clear)
