"""What each queue promises in its default mode, and which of its original's bugs strict mode keeps."""

import itertools
from fractions import Fraction
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.chassis.tables import read_tables
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.continuous import Continuous
from lorrery.scheduler.core.batching.llm_mock import LlmMock
from lorrery.scheduler.core.batching.static import Static
from lorrery.scheduler.core.devices import TABLES_PACKAGE, Devices
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.memory.unlimited import UnlimitedMemory
from lorrery.scheduler.core.plan import Admitted, Dropped, Idle, Plan
from lorrery.scheduler.core.queues.base import Queue
from lorrery.scheduler.core.queues.cluster import Cluster
from lorrery.scheduler.core.queues.early_drop import PREFILL_ALLOWANCE_PS, EarlyDrop
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.queues.peft import Peft
from lorrery.scheduler.core.queues.pets import MIN_WAITING, Pets, _cut
from lorrery.scheduler.core.queues.profile import DeviceProfile, MeasuredProfile, Profile
from lorrery.scheduler.core.queues.vtc_fair import INPUT_PRICE, OUTPUT_PRICE, VtcFair
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_options import ReplicaOptions
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.policy.drive import Device, World, jump, step_by_step
from lorrery.vocabulary.units import NEVER

A, B, C = (Adapter(name, 1) for name in "abc")


def replica_of(queue: Queue, *, pool: int = 200, places: int = 4, strict: bool = False) -> Replica:
    return Replica(
        queue,
        Continuous(BatchLimits(places, pool)),
        PeakMemory(pool, exact=True),
        options=ReplicaOptions(strict=strict),
    )


def request(handle: int, adapter: Adapter | None = A, *, prompt: int = 5, output: int = 4, at_ps: int = 0) -> Sequence:
    return Sequence(handle, prompt, output, at_ps, adapter)


def world(sequences: list[Sequence]) -> World:
    return World([(sequence.arrived_ps, sequence, sequence.max_new_tokens) for sequence in sequences])


def admitted(log: list[tuple[object, ...]]) -> list[object]:
    return [entry[2] for entry in log if entry[0] == "admitted"]


def try_once(replica: Replica, at_ps: int = 0) -> list[int]:
    decision = replica.plan(at_ps)
    return [event.sequence.handle for event in decision.events if isinstance(event, Admitted)]


def most_overtakes(log: list[tuple[object, ...]], sequences: list[Sequence]) -> int:
    """How many sequences entered while one was the oldest that waited, at most; all arrive at 0."""
    waiting = [sequence.handle for sequence in sequences]
    overtakes, most = 0, 0
    for handle in admitted(log):
        if handle == waiting[0]:
            overtakes = 0
        else:
            overtakes += 1
        most = max(most, overtakes)
        waiting.remove(handle)
    return most


# --- vtc_fair -----------------------------------------------------------------------------------------------------


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


# --- abort --------------------------------------------------------------------------------------------------------

SLO_PS = PREFILL_ALLOWANCE_PS + 10_000


def test_early_drop_gives_up_a_waiting_request_at_its_deadline_even_if_nothing_runs() -> None:
    replica = replica_of(EarlyDrop(SLO_PS), pool=20)
    replica.submit(request(0, prompt=50), 0)  # never fits
    decision = replica.plan(0)
    assert isinstance(decision, Idle)
    assert decision.until_ps == 10_000
    (dropped,) = replica.plan(10_000).events
    assert isinstance(dropped, Dropped)
    assert not replica.num_waiting


def test_early_drop_serves_the_newest_first_only_under_overload() -> None:
    replica = replica_of(EarlyDrop(SLO_PS), places=2)
    for handle in range(5):
        replica.submit(request(handle, at_ps=handle), handle)
    assert try_once(replica, 10) == [4, 3]
    calm = replica_of(EarlyDrop(SLO_PS), places=10)
    for handle in range(8):
        calm.submit(request(handle), 0)
    assert len(try_once(calm)) == 8  # a batch of eight, so fewer arrivals are no overload
    for handle in (10, 11):
        calm.submit(request(handle, at_ps=1), 1)
    assert try_once(calm, 1) == [10, 11]


@pytest.mark.parametrize(("strict", "dropped"), [(False, False), (True, True)])
def test_early_drop_never_drops_who_was_in_a_batch_before(strict: bool, dropped: bool) -> None:
    queue = EarlyDrop(SLO_PS, strict=strict)
    replica = replica_of(queue)
    replica.submit(request(0), 0)
    assert try_once(replica) == [0]
    (lost,), _ = replica.lose(0)
    replica.submit(lost, 50_000)
    assert [event for event in replica.plan(50_000).events if isinstance(event, Dropped)] == [Dropped(lost)] * dropped


def test_early_drop_counts_arrivals_once_per_batch_but_once_per_try_in_strict_mode() -> None:
    for strict, changes in ((False, False), (True, True)):
        queue = EarlyDrop(strict=strict)
        replica = replica_of(queue, pool=20, strict=strict)
        for handle in range(9):
            replica.submit(request(handle, prompt=50), 0)
        replica.plan(0)
        before = vars(queue.overload).copy()
        replica.plan(1)
        assert (vars(queue.overload) != before) is changes


def test_strict_early_drop_does_not_tell_twice_of_a_cancelled_request() -> None:
    replica = replica_of(EarlyDrop(SLO_PS, strict=True), pool=20, strict=True)
    replica.submit(request(0, prompt=50), 0)
    replica.cancel(0, 1)
    assert [type(event).__name__ for event in replica.plan(1).events] == ["Cancelled"]
    assert not replica.plan(20_000).events
    assert not replica.num_waiting


# --- cluster ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from([A, B, C, None]), min_size=1, max_size=30), most=st.integers(1, 2))
def test_cluster_never_runs_more_adapters_than_it_may(names: list[Adapter | None], most: int) -> None:
    def check(replica: Replica) -> None:
        assert len(replica.running.adapter_keys) <= most

    sequences = [request(index, adapter, output=1 + index % 7) for index, adapter in enumerate(names)]
    log = step_by_step(replica_of(Cluster(most)), world(sequences), check)
    assert sorted(admitted(log)) == [sequence.handle for sequence in sequences]


def test_strict_cluster_runs_any_number_of_adapters() -> None:
    replica = replica_of(Cluster(1, strict=True), strict=True)
    for handle, adapter in enumerate((A, B, C)):
        replica.submit(request(handle, adapter), 0)
    assert try_once(replica) == [0, 1, 2]


@pytest.mark.parametrize(("polluted", "entered"), [(False, [1]), (True, [])])
def test_a_refused_candidate_counts_on_in_strict_clusters_second_pass(polluted: bool, entered: list[int]) -> None:
    memory = PeakMemory(60, keep_refused=polluted)
    replica = Replica(
        Cluster(1, strict=True), Continuous(BatchLimits(9, 60)), memory, options=ReplicaOptions(strict=True)
    )
    replica.submit(request(0, A), 0)
    assert try_once(replica) == [0]
    replica.submit(request(1, None, prompt=4, output=2), 1)  # would fit
    replica.submit(request(2, A, prompt=50), 1)  # goes first, since its adapter runs, and does not
    assert try_once(replica, 1) == entered


# --- cluster, peft and pets: nobody is passed for ever -------------------------------------------------------------


class LengthProfile(Profile):
    def prefill(self, num_sequences: int, tokens: int) -> int:
        return 1 + num_sequences * tokens

    def adapter(self, rank: int, num_sequences: int, tokens: int) -> int:
        return rank * (1 + num_sequences * tokens)


PREFERRING = {
    "cluster": lambda **how: Cluster(1, **how),
    "peft": Peft,
    "pets": lambda **how: Pets(LengthProfile(), **how),
}


@pytest.mark.parametrize("name", PREFERRING)
@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from([1, 5, 20])), min_size=12, max_size=60),
    most=st.integers(0, 6),
)
def test_at_most_so_many_enter_past_the_one_that_has_waited_longest(
    name: str, kinds: list[tuple[Adapter, int]], most: int
) -> None:
    sequences = [request(index, adapter, prompt=prompt) for index, (adapter, prompt) in enumerate(kinds)]
    log = step_by_step(replica_of(PREFERRING[name](max_overtakes=most), places=3), world(sequences))
    # Who becomes the oldest within a pass may have been passed by the rest of it.
    assert most_overtakes(log, sequences) <= most + 2
    skipped = jump(replica_of(PREFERRING[name](max_overtakes=most), places=3), world(sequences_again(sequences)))
    assert skipped == log


def sequences_again(sequences: list[Sequence]) -> list[Sequence]:
    return [request(s.handle, s.adapter, prompt=s.prompt_tokens, output=s.max_new_tokens) for s in sequences]


@pytest.mark.parametrize("name", PREFERRING)
@pytest.mark.parametrize(("strict", "last"), [(False, 50), (True, 299)])
def test_a_request_that_the_queue_does_not_prefer_starves_in_strict_mode_only(
    name: str, strict: bool, last: int
) -> None:
    """One request of another adapter, and long, behind a hot adapter that never lets the batch drain."""
    sequences = [request(0, A, output=10), request(1, B, prompt=60, output=10, at_ps=1)]
    sequences += [request(handle, A, output=3 + handle % 5, at_ps=2) for handle in range(2, 300)]
    queue = PREFERRING[name](strict=strict)
    log = step_by_step(replica_of(queue, pool=80, places=4), world(sequences))
    place = admitted(log).index(1)
    assert place <= last if not strict else place > 250


# --- peft ---------------------------------------------------------------------------------------------------------


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


# --- pets ---------------------------------------------------------------------------------------------------------


@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=7), fixed=st.integers(0, 12))
def test_the_cut_is_as_cheap_as_the_best_of_all_cuts(costs: list[int], fixed: int) -> None:
    costs.sort()

    def cost(piece: list[int]) -> int:
        return fixed + len(piece) * piece[-1]

    cut = _cut(costs, lambda end: [cost(costs[first:end]) for first in range(end)])
    assert list(itertools.chain(*cut)) == costs
    best = inf
    for ends in itertools.product((False, True), repeat=len(costs) - 1):
        bounds = [0, *(index + 1 for index, end in enumerate(ends) if end), len(costs)]
        best = min(best, sum(cost(costs[low:high]) for low, high in itertools.pairwise(bounds)))
    assert sum(cost(piece) for piece in cut) == best


def test_pets_takes_the_short_prompts_together_once_enough_wait() -> None:
    for num_waiting, entered in ((MIN_WAITING, [0, 1]), (MIN_WAITING + 2, [1, 3])):
        replica = replica_of(Pets(LengthProfile()), pool=1000, places=2)
        for handle in range(num_waiting):
            replica.submit(request(handle, prompt=3 if handle % 2 else 300), 0)
        assert try_once(replica) == entered


def test_a_measured_profile_looks_up_as_slora_does() -> None:
    known = {(2, 32): 1.0, (4, 32): 3.0, (2, 64): 2.0}
    profile = MeasuredProfile(lambda num, tokens, rank: known.get((num, tokens), 0) + rank if num < 5 else None)
    assert profile.prefill(1, 10) == profile.prefill(2, 32) == 1.0
    assert profile.prefill(3, 20) == 2.0
    assert profile.prefill(2, 33) == 2.0
    assert profile.prefill(0, 33) == 0
    assert profile.prefill(6, 32) == profile.prefill(5, 32) == profile.prefill(2, 1025) == inf
    assert profile.adapter(8, 2, 32) == 8.0
    assert profile.adapter(0, 2, 32) == profile.adapter(8, 0, 32) == 0
    assert profile.adapter(8, 6, 32) == inf


def test_the_devices_profile_grows_with_rank_number_and_length() -> None:
    profile = Devices(read_tables(TABLES_PACKAGE)).profile("A100-80-SXM", "Llama-2-7B", 1, "roofline")
    assert isinstance(profile, DeviceProfile)
    assert 0 < profile.prefill(1, 100) < profile.prefill(4, 100) < profile.prefill(4, 900)
    assert 0 == profile.adapter(0, 4, 100) < profile.adapter(8, 4, 100) < profile.adapter(64, 4, 100)
    # a few per cent of the prefill, as measured (Punica; S-LoRA's no_lora_compute runs)
    assert 0.005 < profile.adapter(16, 1, 1024) / profile.prefill(1, 1024) < 0.1


# --- llm-mock -----------------------------------------------------------------------------------------------------


def test_llm_mock_runs_one_empty_step_when_its_batch_has_drained() -> None:
    replica = Replica(Fifo(), LlmMock(BatchLimits(2, NEVER)), UnlimitedMemory())
    replica.submit(request(0, None, output=1), 0)
    first = replica.plan(0)
    assert isinstance(first, Plan)
    device = Device({0: 1})
    ran = device.run(first, 0, 1, None)
    replica.commit(first, ran)
    empty = replica.plan(ran.end_ps)
    assert isinstance(empty, Plan)
    assert (empty.max_steps, empty.prefills, empty.decode, empty.joins) == (1, (), False, ())
    ran = device.run(empty, ran.end_ps, 1, None)
    assert replica.commit(empty, ran) == []
    assert isinstance(replica.plan(ran.end_ps), Idle)


def test_llm_mock_runs_no_empty_step_if_somebody_waits() -> None:
    log = step_by_step(
        Replica(Fifo(), LlmMock(BatchLimits(1, NEVER)), UnlimitedMemory()),
        world([request(0, None, output=1), request(1, None, output=1)]),
    )
    (end_ps,) = (entry[1] for entry in log if entry[0] == "finished" and entry[2] == 0)
    assert ("admitted", end_ps, 1, 0) in log
