"""Policies from outside the tree, by dotted name, in a real scheduler's settings."""

import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.settings import load
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.scheduler.service import SchedulerService
from tests.scheduler.core.drive import World, jump, step_by_step

DOCS = Path(__file__).parents[2] / "docs"
HELLO = WorkerHello("w", "A10G", "Llama-2-7B", 1, 200, "roofline", False)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    monkeypatch.delitem(sys.modules, "shortest_first", raising=False)


def world() -> World:
    prompts = {1: 60, 2: 50, 3: 10, 4: 20}
    return World([(n, Sequence(n, prompt, 8, arrived_ps=n), 8) for n, prompt in prompts.items()])


@pytest.mark.usefixtures("examples")
def test_the_example_queue_tries_the_shortest_prompt_first_and_obeys_the_law() -> None:
    settings = load(None, ["scheduler.policy=shortest_first:ShortestFirst", "scheduler.batching=continuous"])
    factory = ReplicaFactory(settings)
    chosen = factory.replica_settings(HELLO)
    log = jump(factory.replica(chosen), world())
    assert [entry[2] for entry in log if entry[0] == "admitted"] == [1, 3, 4, 2]
    assert log == step_by_step(factory.replica(chosen), world())
    assert not settings.scheduler.strict


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    example = (DOCS / "examples" / "shortest_first.py").read_text(encoding="utf-8").rstrip()
    assert f"```python\n{example}\n```" in page
    assert len(example.splitlines()) <= 25


def test_a_way_to_batch_and_a_placement_come_from_outside_too() -> None:
    settings = load(
        None,
        [
            "scheduler.policy=fcfs",
            "scheduler.max_num_batched_tokens=4096",
            "scheduler.batching=lorrery.scheduler.core.batching.mixed:Mixed",
            "scheduler.placement=lorrery.scheduler.core.placements.power_of_two:PowerOfTwo",
        ],
    )
    factory = ReplicaFactory(settings)
    assert type(factory.replica(factory.replica_settings(HELLO)).batching).__name__ == "Mixed"
    assert type(factory.placement()).__name__ == "PowerOfTwo"


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
