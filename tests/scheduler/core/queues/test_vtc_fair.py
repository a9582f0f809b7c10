"""What `vtc_fair` promises: VTC's bound, weights, counters, and S-LoRA's bugs in strict mode."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.whole_prompts import Static
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.queues.vtc_fair import INPUT_PRICE, OUTPUT_PRICE, VtcFair
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.policy.drive import World, jump, step_by_step
from tests.scheduler.core.queues.one_queue import A, B, C, admitted, replica_of, request, try_once, world


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=20, max_size=60),
    weights=st.tuples(st.sampled_from([1, 2, Fraction(1, 3)]), st.sampled_from([1, Fraction(5, 2)])),
    pool=st.integers(60, 120),
    head_start=st.sampled_from([0, 2_000, 40_000]),
)
def test_vtc_serves_backlogged_adapters_alike_within_the_papers_bound(
    lengths: list[tuple[int, int]], weights: tuple[Fraction, Fraction], pool: int, head_start: int
) -> None:
    queue = VtcFair({"a": Fraction(weights[0]), "b": Fraction(weights[1])})
    sequences = [request(index, prompt=prompt, output=output) for index, (prompt, output) in enumerate(lengths)]
    for index, (prompt, output) in enumerate(reversed(lengths), start=len(lengths)):
        sequences.append(request(index, B, prompt=prompt, output=output, at_ps=head_start))
    bound = max(INPUT_PRICE * 30, OUTPUT_PRICE * pool) / min(weights)
    differences: list[Fraction] = []

    def check(replica: Replica) -> None:
        waiting = {sequence.adapter for sequence in replica.queue}
        if {A, B} <= waiting:
            served = queue.served()
            differences.append(served["a"] - served["b"])

    step_by_step(replica_of(queue, pool=pool, places=5), world(sequences), check)
    assert all(abs(difference) <= bound for difference in differences)
    assert max(differences, default=0) - min(differences, default=0) <= 2 * bound


def test_vtc_gives_an_adapter_of_double_weight_about_double() -> None:
    queue = VtcFair({"a": Fraction(2)})
    sequences = [request(index, (A, B)[index % 2], output=10) for index in range(120)]
    log = step_by_step(replica_of(queue, places=3), world(sequences))
    of_a = sum(handle % 2 == 0 for handle in admitted(log)[:60])
    assert 36 <= of_a <= 44


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=20, max_size=60),
    own=st.sampled_from([None, Fraction(2), Fraction(7, 10)]),
    pool=st.integers(60, 120),
)
def test_vtc_by_tenant_serves_tenants_alike_whatever_their_adapters(
    lengths: list[tuple[int, int]], own: Fraction | None, pool: int
) -> None:
    queue = VtcFair({"t": Fraction(3)}, by_tenant=True)
    sequences: list[Sequence] = []
    for tenant in ("t", "u"):
        for prompt, output in lengths:
            number = len(sequences)
            sequences.append(Sequence(number, prompt, output, 0, (A, B, C, None)[number % 4], tenant))
            sequences[-1].weight = own if tenant == "t" else None
    weights = {"t": own or Fraction(3), "u": Fraction(1)}
    bound = max(INPUT_PRICE * 30, OUTPUT_PRICE * pool) / min(weights.values())

    def check(replica: Replica) -> None:
        if {sequence.tenant_id for sequence in replica.queue} == {"t", "u"}:
            served = queue.served()
            assert abs(served["t"] - served["u"]) <= bound + 1

    replica = replica_of(queue, pool=pool, places=5)
    step_by_step(replica, World([(0, sequence, sequence.max_new_tokens) for sequence in sequences]), check)
    assert not len(queue)


def test_vtc_keeps_places_free_for_other_tenants() -> None:
    queue = VtcFair(by_tenant=True, max_running=2)
    sequences = [Sequence(index, 5, 10, 0, (A, B)[index % 2], "t") for index in range(9)]
    replica = replica_of(queue, places=4)
    most = 0

    def check(now: Replica) -> None:
        nonlocal most
        most = max(most, len(now.running))

    log = step_by_step(replica, World([(0, one, 10) for one in sequences]), check)
    assert (most, len(admitted(log))) == (2, 9)


def test_vtc_counters_are_exact_for_any_weights() -> None:
    queue = VtcFair({"a": Fraction(1, 3), "b": Fraction(7, 10)})
    step_by_step(
        replica_of(queue),
        world([request(0, A, prompt=5, output=4), request(1, B, prompt=7, output=3), request(2, None)]),
    )
    # input, and two for each token but the prefill's; by weight
    assert queue.served() == {"a": Fraction(5 + 2 * 3) * 3, "b": Fraction(7 + 2 * 2) * 10 / 7, None: 5 + 2 * 3}


def test_vtc_charges_by_the_weight_that_a_tenants_key_has_now() -> None:
    queue = VtcFair(by_tenant=True)
    sequences = [Sequence(handle, 10, 2, 0, None, "t") for handle in (0, 1)]
    sequences[0].weight, sequences[1].weight = Fraction(2), Fraction(1)
    replica = replica_of(queue)
    for sequence, service in zip(sequences, (Fraction(10 + 2, 2), Fraction(10 + 2, 2) + 10 + 2), strict=True):
        step_by_step(replica, World([(0, sequence, 2)]))
        assert queue.served() == {"t": service}


def test_vtc_charges_nothing_for_who_has_ended_and_is_held_until_the_batch_ends() -> None:
    for drive in (step_by_step, jump):
        queue = VtcFair()
        replica = Replica(queue, Static(BatchLimits(4, 200)), PeakMemory(200, exact=True, together=True))
        drive(replica, world([request(0, A, output=2), request(1, None, output=3), request(2, B, output=10)]))
        assert queue.served() == {"a": 5 + 2 * 1, None: 5 + 2 * 2, "b": 5 + 2 * 9}


@pytest.mark.parametrize(("strict", "lifted"), [(False, True), (True, False)])
def test_vtc_lifts_who_idled_while_another_ran_without_a_queue(strict: bool, lifted: bool) -> None:
    queue = VtcFair(strict=strict)
    step_by_step(replica_of(queue, strict=strict), world([request(0, A, output=20)]))
    queue.append(request(1, B), at_ps=0)
    assert (queue.served()["b"] == queue.served()["a"]) is lifted


def test_vtc_charges_a_requeued_sequence_no_second_time() -> None:
    queue = VtcFair()
    replica = replica_of(queue)
    replica.submit(request(0, prompt=9), 0)
    assert try_once(replica) == [0]
    (lost,), _ = replica.lose(0)
    replica.submit(lost, 0)
    assert try_once(replica) == [0]
    assert queue.served() == {"a": 9}


@pytest.mark.parametrize(("strict", "listed"), [(False, 0), (True, 1)])
def test_vtc_lists_a_cancelled_request_for_good_in_strict_mode(strict: bool, listed: int) -> None:
    queue = VtcFair(strict=strict)
    replica = replica_of(queue, strict=strict)
    replica.submit(request(0), 0)
    replica.cancel(0, 0)
    assert try_once(replica) == []
    replica.submit(request(1), 1)
    assert try_once(replica, 1) == [1]
    assert len(queue) == listed


def test_vtc_looks_ahead_in_fair_order() -> None:
    queue = VtcFair()
    for sequence in (request(0), request(1), request(2, B)):
        queue.append(sequence, at_ps=0)
    assert [sequence.handle for sequence in queue.look_ahead(10)] == [0, 2]
    assert queue.served() == {"a": 0, "b": 0}
