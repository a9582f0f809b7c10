"""Policies from outside the tree, by dotted name, in a real scheduler's settings."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lorrery.scheduler.core.checked.base import original
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.protocols import Batching, Queue
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.scheduler.service import SchedulerService
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import load
from lorrery.validation.policy.drive import World, jump, step_by_step

DOCS = Path(__file__).parents[2] / "docs"
QUEUE = """
from lorrery.scheduler.core.queues.base import ListedQueue
from lorrery.scheduler.core.queues.fifo import Fifo

not_a_class = ListedQueue()


class Patient(ListedQueue):
    def __init__(self, patience: float = 25, *, longest_first: bool = False) -> None:
        super().__init__()
        self.patience_ps, self.longest_first = patience * 1_000, longest_first

    def admit(self, admission, running, at_ps):
        for sequence in sorted(self, key=lambda one: one.input_tokens, reverse=self.longest_first):
            if len(running) and at_ps - sequence.arrived_ps < self.patience_ps:
                continue
            if not admission.admit(sequence):
                break
        self._waiting.remove_all(admission.admitted)
        return []


class PatientFifo(Fifo):
    patience_ps, longest_first = 25_000, False
    admit = Patient.admit


class Needy(Patient):
    def __init__(self, limit: int) -> None:
        super().__init__()


class Failing(Patient):
    def __init__(self) -> None:
        raise ValueError("no such luck")


class Unreadable(Patient):
    @property
    def arrivals_read_state(self):
        raise ValueError("no such luck")


class FewArguments(Patient):
    def admit(self, admission):
        return []


class NoQueue:
    def admit(self, admission, running, at_ps):
        return []
"""
HELLO = WorkerHello("w", "A10G", "Llama-2-7B", 1, 200, "roofline", False)


@pytest.fixture
def my_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the working directory, which is on nobody's path."""
    (tmp_path / "my_module.py").write_text(QUEUE, encoding="utf-8")
    (tmp_path / "my_broken_module.py").write_text("limit = 1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_module", "my_broken_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def factory_of(*overrides: str) -> ReplicaFactory:
    return ReplicaFactory(load(None, [f"scheduler.{override}" for override in overrides]))


@pytest.mark.usefixtures("my_module")
@pytest.mark.parametrize("queue", ["Patient", "PatientFifo"])
def test_a_queue_that_does_not_say_how_long_its_answer_holds_is_asked_at_every_step(queue: str) -> None:
    # The second request may enter when it has waited for 25,000 ps: at a boundary at which nothing else happens.
    arrivals = [(0, Sequence(0, 20, 150, arrived_ps=0), 150), (1_000, Sequence(1, 30, 9, arrived_ps=1_000), 9)]
    factory = factory_of(f"policy=my_module:{queue}")
    settings = factory.replica_settings(replace(HELLO, max_total_token_num=10_000))
    log = step_by_step(factory.replica(settings), World(arrivals).anew())
    admitted_ps = next(entry[1] for entry in log if entry[0] == "admitted" and entry[2] == 1)
    assert 26_000 <= admitted_ps < 28_500
    assert jump(factory.replica(settings), World(arrivals).anew()) == log


@pytest.mark.usefixtures("my_module")
def test_options_are_keyword_arguments_of_the_class() -> None:
    factory = factory_of("policy=my_module:Patient", "policy_options={patience = 0.5, longest_first = true}")
    queue: Any = original(factory.replica(factory.replica_settings(HELLO)).queue)
    assert (queue.patience_ps, queue.longest_first) == (500, True)


@pytest.mark.usefixtures("my_module")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["policy=my_module:Patient", "policy_options.patienc=1"],
            "scheduler.policy_options.patienc: no such option; Patient takes patience, longest_first",
        ),
        (
            ["policy=my_module:FewArguments", "policy_options.patienc=1"],
            "scheduler.policy_options.patienc: no such option; FewArguments takes patience, longest_first",
        ),
        (["policy=my_module:Needy"], "scheduler.policy_options.limit: Needy needs this option"),
        (
            ["policy=my_module:Failing"],
            "scheduler.policy: my_module:Failing: making it raised ValueError: no such luck (my_module.py, line ",
        ),
        (
            ["policy=my_module:Unreadable"],
            "scheduler.policy: my_module:Unreadable: its arrivals_read_state raised ValueError: no such luck",
        ),
        (
            ["policy=my_module:FewArguments"],
            "scheduler.policy: my_module:FewArguments: admit(admission) is called as (admission, running, at_ps)",
        ),
        (
            ["policy=my_module:NoQueue"],
            "scheduler.policy: my_module:NoQueue: it is no Queue, which has __len__, __iter__, append, cancel, clear, ",
        ),
        (
            ["policy=my_module:not_a_class"],
            "scheduler.policy: my_module:not_a_class: it is not a class, but a ListedQueue",
        ),
        (
            ["policy=my_broken_module:Queue"],
            "scheduler.policy: my_broken_module:Queue: importing my_broken_module raised ZeroDivisionError: division ",
        ),
        (["batching=my_module:NoQueue"], "scheduler.batching: my_module:NoQueue: it is no Batching, which has choose"),
        (
            ["placement=my_module:NoQueue"],
            "scheduler.placement: my_module:NoQueue: it is no Placement, which has place",
        ),
    ],
)
def test_what_cannot_be_a_plug_in_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        factory_of(*overrides)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_options_of_a_policy_that_is_none_of_ones_own_are_an_error() -> None:
    with pytest.raises(SettingsError, match=r"policy_options are for a custom policy, module:Class; policy is"):
        factory_of("policy=fcfs", "policy_options.patience=1")


@pytest.mark.usefixtures("my_module")
def test_a_policy_of_ones_own_runs_under_what_fcfs_runs_under_unless_told_otherwise() -> None:
    def chosen(*overrides: str) -> tuple[str, object, object]:
        factory = factory_of(*overrides)
        replica = factory.replica(factory.replica_settings(HELLO))
        return type(replica.batching).__name__, replica.batching.limits, getattr(replica.memory, "exact", None)

    plug_in = "policy=my_module:Patient"
    assert chosen(plug_in) == chosen("policy=fcfs")
    assert chosen(plug_in, "batching=slora_loop", "limits=slora") == chosen("policy=req_queue")
    assert chosen(plug_in) != chosen("policy=req_queue")


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    for name in ("shortest_first", "patient", "patient_fast"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def world() -> World:
    prompts = {1: 60, 2: 50, 3: 10, 4: 20}
    return World([(n, Sequence(n, prompt, 8, arrived_ps=n), 8) for n, prompt in prompts.items()])


@pytest.mark.usefixtures("examples")
def test_the_example_queue_tries_the_shortest_prompt_first_and_obeys_the_law() -> None:
    settings = load(None, ["scheduler.policy=shortest_first:ShortestFirst"])
    factory = ReplicaFactory(settings)
    chosen = factory.replica_settings(HELLO)
    log = jump(factory.replica(chosen), world())
    assert [entry[2] for entry in log if entry[0] == "admitted"] == [1, 3, 4, 2]
    assert log == step_by_step(factory.replica(chosen), world())
    assert not settings.scheduler.strict


@pytest.mark.usefixtures("examples")
def test_both_examples_decide_the_same_however_they_are_asked() -> None:
    arrivals = [(n * 900, Sequence(n, (37 * n) % 80 + 9, 8, arrived_ps=n * 900), 8) for n in range(12)]

    def played(name: str, patience_seconds: float, *, by_steps: bool) -> object:
        factory = factory_of(f"policy={name}", f"policy_options.patience_seconds={patience_seconds}")
        replica = factory.replica(factory.replica_settings(HELLO))
        return (step_by_step if by_steps else jump)(replica, World(arrivals).anew())

    log = played("patient:Patient", 2e-8, by_steps=True)
    for name in ("patient:Patient", "patient_fast:FastPatient"):
        assert played(name, 2e-8, by_steps=False) == log
    assert played("patient:Patient", 2e-8, by_steps=True) != played("patient:Patient", 1.0, by_steps=True)


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (DOCS / "plug-ins.md").read_text(encoding="utf-8")
    example = (DOCS / "examples" / "patient_fast.py").read_text(encoding="utf-8").rstrip()
    assert f"```python\n{example}\n```" in page


def test_a_way_to_batch_and_a_placement_come_from_outside_too() -> None:
    settings = load(
        None,
        [
            "scheduler.policy=fcfs",
            "scheduler.max_num_batched_tokens=4096",
            "scheduler.batching=lorrery.scheduler.core.batching.whole_prompts:Mixed",
            "scheduler.placement=lorrery.scheduler.core.placements.by_load:PowerOfTwo",
        ],
    )
    factory = ReplicaFactory(settings)
    assert type(original(factory.replica(factory.replica_settings(HELLO)).batching)).__name__ == "Mixed"
    assert type(original(factory.placement())).__name__ == "PowerOfTwo"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scheduler.policy=nowhere:Queue", "scheduler.policy: nowhere:Queue: No module named 'nowhere'"),
        ("scheduler.policy=json:Queue", "scheduler.policy: json:Queue: module 'json' has no attribute 'Queue'"),
    ],
)
async def test_a_name_that_leads_nowhere_is_an_error_at_the_start(override: str, message: str) -> None:
    settings = load(None, [override])
    with pytest.raises(SettingsError, match=message):
        SchedulerService(settings, CollectorRegistry())


def test_a_name_that_is_none_is_an_error_that_lists_them() -> None:
    with pytest.raises(SettingsError, match=r"scheduler\.policy: 'lifo' is none of req_queue, fcfs"):
        load(None, ["scheduler.policy=lifo"])


@pytest.mark.parametrize("protocol", [Queue, Batching, Placement])
def test_a_class_may_derive_from_its_protocol(protocol: type) -> None:
    made = type("Own", (protocol,), {})
    assert isinstance(made(), made)
