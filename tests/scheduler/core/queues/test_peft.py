"""`peft` runs one adapter at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.scheduler.core.queues.few_adapters import Peft
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter
from lorrery.validation.policy.drive import step_by_step
from tests.scheduler.core.queues.one_queue import A, B, C, admitted, replica_of, request, try_once, world


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from([A, B, C, None]), min_size=1, max_size=30), strict=st.booleans())
def test_peft_runs_one_adapter_at_a_time(names: list[Adapter | None], strict: bool) -> None:
    def check(replica: Replica) -> None:
        running = [*replica.running, *replica.running.prefilling.values()]
        assert len({sequence.adapter for sequence in running}) <= 1

    sequences = [request(index, adapter, output=1 + index % 7) for index, adapter in enumerate(names)]
    log = step_by_step(replica_of(Peft(strict=strict), strict=strict), world(sequences), check)
    assert len(admitted(log)) == len(sequences)


@pytest.mark.parametrize(("strict", "entered"), [(False, [1]), (True, [])])
def test_a_cancelled_head_keeps_strict_peft_from_ever_forming_a_batch(strict: bool, entered: list[int]) -> None:
    replica = replica_of(Peft(strict=strict), strict=strict)
    replica.submit(request(0, A), 0)
    replica.cancel(0, 1)
    replica.submit(request(1, B), 2)
    assert try_once(replica, 3) == entered


def test_strict_peft_lets_the_batch_drain_once_31_others_are_listed_before() -> None:
    for num_others, entered in ((30, [99]), (31, [])):
        replica = replica_of(Peft(strict=True), strict=True)
        replica.submit(request(0, A), 0)
        assert try_once(replica) == [0]
        for handle in range(1, num_others + 1):
            replica.submit(request(handle, B), 1)
        replica.submit(request(99, A), 2)
        assert try_once(replica, 2) == entered
