"""The true length of an output is out of a policy's reach: nothing that a queue or a placement is given leads to it."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, ClassVar

import pytest

from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.placements.base import Candidate, Choice
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence as CoreSequence
from lorrery.service.faults.kinds import parse_fault
from lorrery.service.settings.cluster import load
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.options import SimulationOptions
from lorrery.simulator.run import SimulatedRun
from lorrery.worker.device.output import Ending

SECRETS = (SimulatedRequest, WorkloadRequest, Ending)
CONFIG = Path(__file__).parents[2] / "deploy" / "cluster.toml"


def parts(thing: Any) -> Iterator[Any]:
    """What an object leads to: attributes, slots, items, closures, defaults, and the object of a bound method."""
    if isinstance(thing, dict):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif isinstance(thing, MethodType | BuiltinMethodType):
        yield thing.__self__
        yield getattr(thing, "__func__", None)
    elif isinstance(thing, FunctionType):
        yield from (thing.__closure__ or (), thing.__defaults__ or (), thing.__kwdefaults__ or {})
    elif isinstance(thing, CellType):
        yield thing.cell_contents
    elif isinstance(thing, partial):
        yield from (thing.func, thing.args, thing.keywords)
    else:
        yield getattr(thing, "__dict__", None)
        for kind in type(thing).__mro__:
            for name, member in kind.__dict__.items():
                compiled = isinstance(member, GetSetDescriptorType) and kind.__module__.startswith("lorrery.")
                if compiled or isinstance(member, MemberDescriptorType):
                    yield getattr(thing, name, None)


def reachable(*things: Any) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    left = list(things)
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, ModuleType | type | str | bytes | int | float | None):
            continue
        seen[id(thing)] = thing  # kept, so that no other gets its id
        yield thing
        left += parts(thing)


class Found:
    """What the policies below have come upon, and how many objects they have looked at."""

    secrets: ClassVar[list[str]] = []
    kinds: ClassVar[set[type]] = set()

    @classmethod
    def pry(cls, *things: Any) -> None:
        for thing in reachable(*things):
            cls.kinds.add(type(thing))
            if isinstance(thing, SECRETS):
                cls.secrets.append(repr(thing))


class PryingQueue(Fifo):
    def append(self, sequence: CoreSequence, at_ps: int) -> None:
        Found.pry(self, sequence)
        super().append(sequence, at_ps)

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[CoreSequence]:
        Found.pry(self, admission, running)
        return super().admit(admission, running, at_ps)


class PryingPlacement:
    def __init__(self, *_arguments: object) -> None:
        pass

    def place(self, sequence: CoreSequence, candidates: Sequence[Candidate]) -> Choice:
        Found.pry(self, sequence, candidates)
        return Choice(candidates[sequence.handle % len(candidates)], "in turn")


@pytest.mark.parametrize(
    "workload",
    [{"rate": 8.0}, {"workload": "chat", "rate": 4.0, "think": 0.1}, {"workload": "mooncake", "speed_up": 3.0}],
    ids=["poisson", "chat", "mooncake"],
)
def test_no_policy_finds_the_true_length_in_anything_that_it_is_given(
    workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Found, "secrets", [])
    monkeypatch.setattr(Found, "kinds", set())
    settings = load(
        CONFIG,
        [
            f"scheduler.policy='{__name__}:PryingQueue'",
            f"scheduler.placement='{__name__}:PryingPlacement'",
            "scheduler.max_num_batched_tokens=24576",
            "scheduler.max_req_input_len=16384",
            "scheduler.max_req_total_len=20480",
            "adapters.max_loras=2",
            "scheduler.prefix_cache={kind='blocks'}",
        ],
    )
    options = LoadOptions(num_requests=12, adapters="all", ignore_eos=False, max_new_tokens=600, **workload)
    faults = (parse_fault("adapter_load_failure,at=0,for=0.5"), parse_fault("worker_loss,at=1,worker=worker-1,for=1"))
    report = SimulatedRun(settings, options, SimulationOptions(workers=2, faults=faults)).run()
    assert "INTERNAL" not in report.outcomes.status  # a policy that raised while it looked would fail its requests
    assert Found.secrets == []
    names = {kind.__name__ for kind in Found.kinds}
    assert {
        "Sequence",
        "AdmissionPass",
        "Running",
        "ReplicaBatchContext",
        "Residency",
        "Fault",
        "ReplicaCandidate",
        "Replica",
    } <= names


def test_the_search_finds_what_is_hidden_behind_closures_and_bound_methods() -> None:
    request = SimulatedRequest(1, 5, 5, 0, Ending(3, 3))  # type: ignore[arg-type]

    class Holder:
        __slots__ = ("call",)

        def __init__(self, call: Any) -> None:
            self.call = call

    for call in (request.device, lambda: request, partial(print, request), {"a": [request]}):
        assert any(thing is request for thing in reachable(Holder(call)))
