"""What a worker is told of its replica for others' names: once, and which adapters run and wait not with every plan."""

from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.subscribers.engine_counts import NAMES_EVERY_PS, EngineTally
from lorrery.service.telemetry.output_groups import OutputGroups


def waiting(handle: int, adapter_id: str) -> Sequence:
    return Sequence(handle, prompt_tokens=8, max_new_tokens=8, adapter=Adapter(adapter_id, 8))


def tally() -> EngineTally:
    replica = build_replica(ReplicaSettings("fcfs", max_total_token_num=1000, max_req_total_len=100))
    return EngineTally(replica, 1000, 16, 4, OutputGroups(), lambda handle: None)


def test_names_go_with_a_plan_now_and_then_and_with_the_next_heartbeat_at_the_latest():
    told = tally()
    told.placed(waiting(1, "one"))
    assert told.take(0).adapters.waiting == ["one"]
    told.placed(waiting(2, "two"))
    assert not told.take(NAMES_EVERY_PS - 1).HasField("adapters")
    assert told.take(NAMES_EVERY_PS).adapters.waiting == ["one", "two"]
    told.placed(waiting(3, "three"))
    assert not told.take(NAMES_EVERY_PS + 1).HasField("adapters")
    assert told.take(NAMES_EVERY_PS + 2, only_changes=True).adapters.waiting == ["one", "two", "three"]


def test_a_heartbeat_that_finds_nothing_new_is_told_nothing():
    told = tally()
    told.placed(waiting(1, "one"))
    assert told.take(0, only_changes=True).adapters.waiting == ["one"]
    assert told.take(1, only_changes=True) is None
    told.gave_back([waiting(1, "one")])
    assert not told.take(2).HasField("adapters")
    assert told.take(3, only_changes=True).adapters.waiting == []
    assert told.take(4, only_changes=True) is None
