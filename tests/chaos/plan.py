"""What happens to the services and when: drawn from a seed, the same for the same seed.

A plan says when each action begins. How long a start takes, and which stream is where by then, is the machine's doing;
so a replay meets the same actions, not the same moments.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

ADAPTERS = tuple(f"x-{number}" for number in range(6))
"""Loaded and unloaded at run time."""
RANKS = (8, 16, 32, 64)
LOADGEN = "loadgen"

QUIET_SECONDS = 3.0
"""Before the first action."""
MEAN_GAP_SECONDS = 1.8
"""Between the beginnings of two actions on services."""
ADAPTER_GAP_SECONDS = 0.8
DOWN_SECONDS = (0.1, 4.0)
STOP_SECONDS = (0.2, 10.0)
START_SECONDS = 6.0
"""What a start, or a drain, is expected to take: until then the plan leaves a service alone."""
SCALE_GAP_SECONDS = 3.0
"""Between two changes of how many there are of a service."""
SCALED_SECONDS = 6.0
"""For which one that was added, or taken away, is left as it is."""
TOGETHER_SHARE = 0.2
"""Actions that hit a second service in the same moment."""


class Kind(StrEnum):
    """What is done."""

    KILL = "SIGKILL"
    TERMINATE = "SIGTERM"
    STOP = "SIGSTOP"
    LOAD = "load"
    UNLOAD = "unload"
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens.

    Attributes:
        at_seconds: after the beginning.
        target: the process, or the router that is asked.
        seconds: until it starts again or goes on.
        adapter_id: that is loaded or unloaded.
        rank: it is loaded with.
    """

    at_seconds: float
    kind: Kind
    target: str
    seconds: float = 0.0
    adapter_id: str = ""
    rank: int = 0

    def __str__(self) -> str:
        """Return its line of the timeline."""
        match self.kind:
            case Kind.LOAD:
                what = f"{self.adapter_id} with rank {self.rank} through {self.target}"
            case Kind.UNLOAD:
                what = f"{self.adapter_id} through {self.target}"
            case Kind.ADD | Kind.REMOVE:
                what = self.target
            case Kind.STOP:
                what = f"{self.target} for {self.seconds:.2f} s"
            case _:
                what = f"{self.target}, starts again {self.seconds:.2f} s after its end"
        return f"{self.at_seconds:8.3f} s  {self.kind:<7}  {what}"


def draw_plan(
    seed: int, seconds: float, services: Sequence[str], routers: Sequence[str], extras: Sequence[str] = ()
) -> list[Action]:
    """Draw what happens within `seconds`, in order of time.

    Args:
        seed: of all that is drawn.
        seconds: when the last action begins at the latest.
        services: that are killed and stopped, `LOADGEN` among them.
        routers: of those, through which adapters are loaded and unloaded.
        extras: services that are added and removed; in the end there are none of them.
    """
    rng, scale_rng = random.Random(f"chaos/{seed}"), random.Random(f"chaos/scale/{seed}")
    actions = [
        *_on_services(rng, seconds, services),
        *_on_adapters(rng, seconds, routers),
        *_on_scale(scale_rng, seconds, extras),
    ]
    return sorted(actions, key=lambda action: action.at_seconds)


def _on_services(rng: random.Random, seconds: float, services: Sequence[str]) -> Iterable[Action]:
    free_from = dict.fromkeys(services, 0.0)
    at = QUIET_SECONDS
    while (at := round(at + rng.expovariate(1 / MEAN_GAP_SECONDS), 3)) < seconds:
        for _ in range(2 if rng.random() < TOGETHER_SHARE else 1):
            free = [name for name, free_at in free_from.items() if free_at <= at]
            if not free:
                break
            target = rng.choice(free)
            kind = rng.choices((Kind.KILL, Kind.TERMINATE, Kind.STOP), (4, 3, 3))[0]
            lasts = round(rng.uniform(*(STOP_SECONDS if kind is Kind.STOP else DOWN_SECONDS)), 3)
            free_from[target] = at + lasts + START_SECONDS
            yield Action(at, kind, target, lasts)


def _on_adapters(rng: random.Random, seconds: float, routers: Sequence[str]) -> Iterable[Action]:
    """Load what is not loaded and unload what is, so that most calls have something to do."""
    loaded: set[str] = set()
    at = 0.0
    while (at := round(at + rng.expovariate(1 / ADAPTER_GAP_SECONDS), 3)) < seconds:
        adapter_id, router = rng.choice(ADAPTERS), rng.choice(routers)
        if adapter_id in loaded:
            loaded.remove(adapter_id)
            yield Action(at, Kind.UNLOAD, router, adapter_id=adapter_id)
        else:
            loaded.add(adapter_id)
            yield Action(at, Kind.LOAD, router, adapter_id=adapter_id, rank=rng.choice(RANKS))


def _on_scale(rng: random.Random, seconds: float, extras: Sequence[str]) -> Iterable[Action]:
    """Add what is not there and remove what is; at the end, all that is there."""
    free_from = dict.fromkeys(extras, 0.0)
    there: list[str] = []
    at = 0.0
    while (at := round(at + rng.expovariate(1 / SCALE_GAP_SECONDS), 3)) < seconds:
        free = [name for name, free_at in free_from.items() if free_at <= at]
        if not free:
            continue
        target = rng.choice(free)
        free_from[target] = at + SCALED_SECONDS
        if target in there:
            there.remove(target)
            yield Action(at, Kind.REMOVE, target)
        else:
            there.append(target)
            yield Action(at, Kind.ADD, target)
    for target in there:
        yield Action(seconds, Kind.REMOVE, target)
