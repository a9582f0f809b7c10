"""What names of candidates stand for."""

import pytest

from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import QUEUES
from lorrery.service.errors import SettingsError
from lorrery.simulator.arena.candidates import candidates_of


def overrides(*names: str, given: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return [one.overrides for one in candidates_of(names, given)]


def test_a_name_is_a_policy_a_way_to_batch_a_placement_or_a_setting() -> None:
    assert overrides("fcfs", "chunked", "adapter_hash", "paged", "radix", "my.own:Queue") == [
        ("scheduler.policy=fcfs",),
        ("scheduler.batching=chunked",),
        ("scheduler.placement=adapter_hash",),
        ("scheduler.memory=paged",),
        ("scheduler.prefix_cache.kind=radix",),
        ("scheduler.policy=my.own:Queue",),
    ]
    assert overrides("placement=my:Own", "adapters.max_loras=4,memory=paged") == [
        ("scheduler.placement=my:Own",),
        ("adapters.max_loras=4", "scheduler.memory=paged"),
    ]
    assert overrides("vtc_fair,fair_by=tenant", 'fair_weights={a=1,"b"=2}')[1] == (
        'scheduler.fair_weights={a=1,"b"=2}',
    )


def test_a_policy_gets_what_it_cannot_do_without_unless_it_is_given() -> None:
    assert overrides("lpm", "cluster") == [
        ("scheduler.policy=lpm", "scheduler.memory=estimated"),
        ("scheduler.policy=cluster", "scheduler.batch_num_adapters=4"),
    ]
    assert overrides("cluster,batch_num_adapters=2", "fcfs")[0] == (
        "scheduler.policy=cluster",
        "scheduler.batch_num_adapters=2",
    )
    assert overrides("cluster", "fcfs", given=("scheduler.batch_num_adapters=2",))[0] == ("scheduler.policy=cluster",)


def test_one_name_is_against_all_of_its_kind_and_none_is_all_policies() -> None:
    assert [one.name for one in candidates_of([], [])] == list(QUEUES)
    found = candidates_of(["my:Own"], [])
    assert [(one.name, one.is_asked) for one in found] == [("my:Own", True), *((name, False) for name in QUEUES)]
    assert {one.name for one in candidates_of(["adapter_hash"], [])} == set(PLACEMENTS)
    assert len(candidates_of(["fcfs"], [])) == len(QUEUES)


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (["fcfs", "lifo"], [], "'lifo' is no candidate: expected a name, KEY=VALUE, or module:Class"),
        (["fcfs", "fcfs"], [], "fcfs is given twice"),
        (["fcfs", "policy=fcfs"], [], "policy=fcfs is given twice"),
        (["fcfs", "lpm"], ["scheduler.policy=peft"], "--set scheduler.policy and the candidate fcfs both say what"),
        (["adapters.max_loras=4"], [], "adapters.max_loras=4 is one candidate; name another"),
        ([f"adapters.max_loras={n}" for n in range(1, 60)], [], "59 candidates; 40 are the most"),
    ],
)
def test_what_cannot_be_compared_is_refused(names: list[str], given: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        candidates_of(names, given)
