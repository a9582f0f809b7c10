"""Where requests go."""

from collections import Counter

import numpy as np
import pytest

from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.placements.candidate import ReplicaCandidate
from lorrery.scheduler.core.placements.forecast import Forecast, OutputShare
from lorrery.scheduler.core.placements.predicted_finish import MOST_NAMES, PredictedFinish
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.prefix_cache.static_trie import StaticTrie
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.simulator.replay.parts import RecordedCandidate
from lorrery.worker.device.steptime import Pace

SETTINGS = ReplicaSettings("fcfs", max_total_token_num=1000, max_req_total_len=100)


class Candidate(RecordedCandidate):
    """A candidate whose replica and forecast a test may change; it is no `ReplicaCandidate`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, {})
        self.replica = build_replica(SETTINGS)
        self.forecast = Forecast(None, OutputShare())
        self._now = ReplicaCandidate(name, self.replica, self.forecast)

    def has_adapter(self, adapter: Adapter) -> bool:
        return self._now.has_adapter(adapter)

    def cached_tokens(self, sequence: Sequence) -> int:
        return self._now.cached_tokens(sequence)

    def load_ps(self, adapter: Adapter) -> int:
        return self._now.load_ps(adapter)

    @property
    def pace(self) -> Pace:
        return self._now.pace

    def _figure(self, name: str) -> int:
        figure: int = getattr(self._now, name)
        return figure


def candidates(*loads: int) -> list[Candidate]:
    made = []
    for number, load in enumerate(loads):
        candidate = Candidate(f"w{number}")
        for handle in range(load):
            candidate.replica.submit(Sequence(1000 * number + handle, 5, 5), 0)
        made.append(candidate)
    return made


def placed(name: str, sequence: Sequence, among: list[Candidate], seed: int = 0) -> str:
    choice = PLACEMENTS[name](np.random.default_rng(seed)).place(sequence, among)
    assert choice.why
    return choice.candidate.name


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_takes_the_only_worker(name: str) -> None:
    for adapter in (None, Adapter("a", 8)):
        assert placed(name, Sequence(1, 5, 5, adapter=adapter), candidates(3)) == "w0"


def test_round_robin_takes_each_in_turn() -> None:
    rule = PLACEMENTS["round_robin"](np.random.default_rng(0))
    among = candidates(5, 0, 0)
    assert [rule.place(Sequence(n, 5, 5), among).candidate.name for n in range(4)] == ["w0", "w1", "w2", "w0"]


def test_least_loaded_prefers_a_worker_with_the_adapter_unless_it_is_much_fuller() -> None:
    among = candidates(4, 1)
    adapter = Adapter("a", 8)
    among[0].replica.adapters.require(adapter, 0)
    assert placed("least_loaded", Sequence(1, 5, 5, adapter=adapter), among) == "w0"
    assert placed("least_loaded", Sequence(1, 5, 5, adapter=Adapter("b", 8)), among) == "w1"
    fuller = candidates(6, 1)
    fuller[0].replica.adapters.require(adapter, 0)
    assert placed("least_loaded", Sequence(1, 5, 5, adapter=adapter), fuller) == "w1"


def test_much_fuller_is_more_than_four_sequences_and_a_quarter_above_the_least() -> None:
    adapter = Adapter("a", 8)
    for loads, chosen in (((25, 20), "w0"), ((26, 20), "w1"), ((4, 0), "w0"), ((5, 0), "w1")):
        among = candidates(*loads)
        among[0].replica.adapters.require(adapter, 0)
        assert placed("least_loaded", Sequence(1, 5, 5, adapter=adapter), among) == chosen, loads


def test_equal_loads_go_where_fewer_kv_tokens_are_held_and_else_to_the_first_to_attach() -> None:
    for prompts, chosen in (((9, 5, 7), "w1"), ((5, 9, 5), "w0"), ((9, 5, 5), "w1")):
        among = candidates(0, 0, 0)
        for candidate, prompt in zip(among, prompts, strict=True):
            candidate.replica.submit(Sequence(1, prompt, 5), 0)
            candidate.replica.plan(0)
            assert candidate.replica.kv_tokens == prompt
        assert placed("least_loaded", Sequence(2, 5, 5), among) == chosen, prompts


def test_adapter_hash_keeps_an_adapter_together_within_the_bound_and_moves_few_when_a_worker_goes() -> None:
    adapters = [Adapter(f"a{n}", 8) for n in range(200)]
    among = candidates(0, 0, 0, 0)
    first = {a.adapter_id: placed("adapter_hash", Sequence(1, 5, 5, adapter=a), among) for a in adapters}
    assert first == {a.adapter_id: placed("adapter_hash", Sequence(1, 5, 5, adapter=a), among) for a in adapters}
    assert min(Counter(first.values()).values()) > 25
    rest = [candidate for candidate in among if candidate.name != "w2"]
    again = {a.adapter_id: placed("adapter_hash", Sequence(1, 5, 5, adapter=a), rest) for a in adapters}
    assert all(again[name] == worker for name, worker in first.items() if worker != "w2")
    full = candidates(20, 0, 0, 0)
    assert all(placed("adapter_hash", Sequence(1, 5, 5, adapter=a), full) != "w0" for a in adapters)


def test_prefix_match_goes_where_the_prompt_is_cached_unless_that_worker_is_much_fuller() -> None:
    prompt = list(range(40))
    sequence = Sequence(1, 40, 5, prompt_token_ids=prompt)
    for loads, chosen in (((3, 2), "w0"), ((30, 2), "w1")):
        among = candidates(*loads)
        among[0].replica.prefix_cache = StaticTrie.build([prompt[:20]])
        assert placed("prefix_match", sequence, among) == chosen
    barely = candidates(3, 2)
    barely[0].replica.prefix_cache = StaticTrie.build([prompt[:2]])
    assert placed("prefix_match", sequence, barely) == "w1"


def test_the_bound_on_a_preferred_workers_load_counts_the_newcomer() -> None:
    # With the newcomer (3, 1) have a mean of 2.5, times 1.5: four may be at w0. (6, 1): six, which are there already.
    prompt = list(range(40))
    for loads, chosen in (((3, 1), "w0"), ((4, 1), "w0"), ((6, 1), "w1")):
        among = candidates(*loads)
        among[0].replica.prefix_cache = StaticTrie.build([prompt])
        assert placed("prefix_match", Sequence(1, 40, 5, prompt_token_ids=prompt), among) == chosen, loads


def test_power_of_two_never_takes_the_fullest_and_is_reproducible() -> None:
    among = candidates(9, 1, 2)
    drawn = [placed("power_of_two", Sequence(1, 5, 5), among, seed) for seed in range(40)]
    assert set(drawn) == {"w1", "w2"}
    assert drawn == [placed("power_of_two", Sequence(1, 5, 5), among, seed) for seed in range(40)]


class Told(Candidate):
    """A candidate of a given pace."""

    def __init__(self, name: str, base_ms: int, slowdown: int = 1000, usual: int = 1000) -> None:
        super().__init__(name)
        self.forecast.pace = Pace(base_ms * 10**9, 10**7, 10**4, base_ms * 10**6)
        self.forecast.slowdown, self.forecast.usual_slowdown = slowdown, usual


def finish(sequence: Sequence, *among: Candidate) -> str:
    return placed("predicted_finish", sequence, list(among))


def test_predicted_finish_takes_the_faster_worker_until_what_waits_there_takes_longer() -> None:
    fast, slow = Told("fast", 10), Told("slow", 25)
    assert finish(Sequence(1, 500, 100), slow, fast) == "fast"
    fast.forecast.waiting_tokens = 1_000_000
    fast.replica.submit(Sequence(7, 5, 5), 0)
    assert finish(Sequence(1, 500, 100), slow, fast) == "slow"
    fast.forecast.waiting_tokens = 100
    assert finish(Sequence(1, 500, 100), slow, fast) == "fast"


def test_predicted_finish_counts_a_slowdown_a_cached_prompt_and_a_loaded_adapter() -> None:
    assert finish(Sequence(1, 500, 100), Told("fast", 10, 4000), Told("slow", 25)) == "slow"
    prompt = list(range(40))
    one, other = Told("one", 10), Told("other", 10)
    other.replica.prefix_cache = StaticTrie.build([prompt])
    assert finish(Sequence(1, 40, 5, prompt_token_ids=prompt), one, other) == "other"
    adapter = Adapter("a", 8)
    one, other = (Told(name, 10) for name in ("one", "other"))
    for each in (one, other):
        each.replica.adapters = Residency(load_ps=lambda _adapter, _tier: 10**12)
    other.replica.adapters.gpu[adapter.key] = adapter
    assert finish(Sequence(1, 5, 5, adapter=adapter), one, other) == "other"


def test_predicted_finish_tries_a_worker_again_that_was_faster_before() -> None:
    rule = PLACEMENTS["predicted_finish"](np.random.default_rng(0))
    slowed, other = Told("slowed", 10), Told("other", 10)
    chosen = [rule.place(Sequence(0, 5, 50), [slowed, other]).candidate.name]
    slowed.forecast.slowdown = 4000
    other.forecast.pace = Pace(*(2 * value for value in other.forecast.pace))
    chosen += [rule.place(Sequence(n, 5, 50), [slowed, other]).candidate.name for n in range(1, 400)]
    assert chosen[:2] == ["slowed", "other"]
    tried = chosen.index("slowed", 1)
    assert 64 < tried < 200
    steady = Told("steady", 40)
    rule = PLACEMENTS["predicted_finish"](np.random.default_rng(0))
    assert {rule.place(Sequence(n, 5, 50), [steady, other]).candidate.name for n in range(1000)} == {"other"}


def test_predicted_finish_halves_a_slowdown_also_where_other_requests_fit_few_workers() -> None:
    rule = PLACEMENTS["predicted_finish"](np.random.default_rng(0))
    slowed, other = Told("slowed", 10), Told("other", 20)
    fleet = [slowed, other, *(Told(f"w{number}", 1000) for number in range(30))]
    for worker in fleet:
        rule.place(Sequence(0, 5, 50), [worker])
    slowed.forecast.slowdown = 4000
    chosen = []
    for number in range(200):
        rule.place(Sequence(number, 5, 50), [other])
        chosen.append(rule.place(Sequence(number, 5, 50), fleet).candidate.name)
    assert chosen[0] == "other"
    assert "slowed" in chosen


def test_predicted_finish_remembers_a_bounded_number_of_workers_and_holds_nothing_against_the_others() -> None:
    rule, slowed, other = PredictedFinish(), Told("slowed", 10, 4000), Told("other", 20)
    for number in range(50):
        rule.place(Sequence(number, 5, 50), [slowed])
    assert rule.place(Sequence(1, 5, 50), [slowed, other]).candidate is other
    passing = Told("", 10)
    for number in range(3 * MOST_NAMES):
        passing.name = f"gone-{number}"
        rule.place(Sequence(number, 5, 50), [passing])
        assert len(rule._last_placed) <= MOST_NAMES
    assert "slowed" not in rule._last_placed
    assert rule.place(Sequence(1, 5, 50), [slowed, other]).candidate is slowed
    assert rule.place(Sequence(2, 5, 50), [slowed, other]).candidate is other
