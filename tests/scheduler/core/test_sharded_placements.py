"""Placements that look at a few workers of many: rendezvous hashing, shards, weighted scores."""

from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import Placed
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements import by_adapter
from lorrery.scheduler.core.placements.by_adapter import PlacementOptions, Rankings, Weighted, Weights, weight
from lorrery.scheduler.core.placements.by_load import Draw
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.simulator.replay.parts import RecordedCandidate
from lorrery.worker.device.steptime import Pace

SEATS = 24
SHARDED = ("adapter_shards", "weighted")
FIGURES = {
    **Pace(10**10, 10**7, 10**4, 10**7)._asdict(),
    **dict.fromkeys(("slowdown", "usual_slowdown", "output_ratio"), 1000),
    **dict.fromkeys(("kv_tokens", "is_blocked", "prompt_share", "waiting_tokens"), 0),
}
"""Of each worker, beside those that are given."""


class Worker(RecordedCandidate):
    """A candidate with given figures, which counts how often it is looked at."""

    def __init__(
        self,
        name: str,
        num_waiting: int = 0,
        num_running: int = 0,
        adapters: frozenset[str] = frozenset(),
        cached: int = 0,
    ) -> None:
        self.figures = {**FIGURES, "num_waiting": num_waiting, "num_running": num_running}
        super().__init__(name, self.figures)
        self.adapters, self.cached = adapters, cached
        self.num_looks = 0

    @property
    def load(self) -> int:
        self.num_looks += 1
        return self.num_waiting + self.num_running

    def has_adapter(self, adapter: Adapter) -> bool:
        return adapter.adapter_id in self.adapters

    def cached_tokens(self, sequence: Sequence) -> int:
        return min(self.cached, sequence.input_tokens)

    def load_ps(self, adapter: Adapter) -> int:
        return 0 if self.has_adapter(adapter) else 10**10


class CountingGenerator(np.random.Generator):
    """Counts what is drawn."""

    num_drawn = 0

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(1))

    def random(self, size: int) -> np.ndarray:  # type: ignore[override]
        self.num_drawn += size
        return super().random(size)


def fleet(count: int) -> list[Worker]:
    return [Worker(f"w{number}") for number in range(count)]


def request(handle: int, adapter: str | None) -> Sequence:
    return Sequence(handle, 50, 5, adapter=None if adapter is None else Adapter(adapter, 8))


names = st.sampled_from(["a", "b", "c"])
workers = st.lists(
    st.tuples(
        st.integers(0, 99).map("w{}".format),
        st.integers(0, 9),
        st.integers(0, 30),
        st.frozensets(names),
        st.integers(0, 60),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda worker: worker[0],
)
"""What each is made of. Hypothesis refers weakly to what it makes, which ends in a crash where the base is compiled."""
options = st.builds(
    PlacementOptions,
    st.integers(1, 5),
    st.integers(1, 5),
    st.builds(Weights, *[st.sampled_from([0.0, 0.5, 1.0, 3.0])] * 4),
)


@given(st.sampled_from(sorted(PLACEMENTS)), st.lists(st.tuples(workers, names | st.none()), max_size=6), options)
def test_every_placement_chooses_one_of_the_workers_that_it_is_given(
    name: str, asked: list[tuple[list[tuple[Any, ...]], str | None]], chosen: PlacementOptions
) -> None:
    placement = PLACEMENTS[name](np.random.default_rng(1), chosen)
    for handle, (made_of, adapter) in enumerate(asked):
        among = [Worker(*one) for one in made_of]
        choice = placement.place(request(handle, adapter), among)
        assert any(choice.candidate is worker for worker in among)
        assert choice.why


@given(
    st.sampled_from(sorted(PLACEMENTS)),
    st.lists(st.sampled_from([40, 80, 160]), min_size=2, max_size=5),
    st.lists(st.integers(1, 150), max_size=8),
)
def test_a_request_goes_only_where_it_can_be_held(name: str, pools: list[int], prompts: list[int]) -> None:
    core = ClusterCore(PLACEMENTS[name](np.random.default_rng(1)))
    for number, pool in enumerate(pools):
        settings = ReplicaSettings("fcfs", pool, 1000, batch_max_tokens=1000)
        core.attach(Member(f"w{number}", build_replica(settings)), 0)
    for handle, prompt in enumerate(prompts):
        sequence = Sequence(handle, prompt, 5)
        holders = {one.name for one in core.members.values() if one.replica.never_fits_reason(sequence) is None}
        placed = [event for event in core.submit(sequence, 0) if isinstance(event, Placed)]
        assert {event.member.name for event in placed} <= holders
        assert bool(placed) == bool(holders)


@given(st.integers(2, 12), st.integers(1, 4), st.data())
def test_a_worker_that_leaves_or_joins_moves_only_the_adapters_that_rank_it_high(
    count: int, depth: int, data: st.DataObject
) -> None:
    among = fleet(count)
    gone = data.draw(st.sampled_from(among))
    rest = [worker for worker in among if worker is not gone]
    every, fewer = Rankings(depth), Rankings(depth)
    for adapter in map(str, range(40)):
        before = [among[index].name for index in every.head(adapter, among)]
        after = [rest[index].name for index in fewer.head(adapter, rest)]
        kept = [name for name in before if name != gone.name]
        assert after[: len(kept)] == kept  # and so, from few to all, only the one that joined is new
        assert len(after) == min(depth, len(rest))


def test_a_worker_gets_its_share_of_adapters() -> None:
    among, rankings = fleet(10), Rankings(2)
    homes = Counter(index for number in range(2000) for index in rankings.head(f"a{number}", among))
    assert all(300 < count < 500 for count in homes.values())


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How often which adapter was hashed with which worker."""
    counted = Counter[tuple[str, str]]()

    def count(adapter_id: str, worker_id: str) -> bytes:
        counted[adapter_id, worker_id] += 1
        return weight(adapter_id, worker_id)

    monkeypatch.setattr(by_adapter, "weight", count)
    return counted


def test_rankings_of_two_sets_of_workers_in_turn_are_each_made_once(hashed: Counter[tuple[str, str]]) -> None:
    every, rankings = fleet(6), Rankings(3)
    large = every[::2]
    for number in range(20):
        head = rankings.head(f"a{number % 2}", large if number % 3 else every)
        assert head == Rankings(3).head(f"a{number % 2}", large if number % 3 else every)
    hashed.clear()
    for number in range(20):
        rankings.head(f"a{number % 2}", large if number % 3 else every)
        rankings.head(f"a{number % 2}", list(every))
    assert not hashed


def test_rankings_of_few_sets_of_workers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_adapter, "MOST_KEPT", 20)
    among, rankings = fleet(30), Rankings(3)
    for number in range(200):
        some = among[number % 28 :]
        assert rankings.head(f"a{number % 7}", some) == Rankings(3).head(f"a{number % 7}", some)
        assert len(rankings._by_list) <= by_adapter.MOST_LISTS
        assert rankings._num_kept == sum(len(one.heads) for one in rankings._by_names.values()) <= 20


def test_in_a_mixed_fleet_no_request_costs_the_hashes_of_one_before(hashed: Counter[tuple[str, str]]) -> None:
    core = ClusterCore(PLACEMENTS["adapter_shards"](np.random.default_rng(1)))
    for number in range(6):
        settings = ReplicaSettings("fcfs", 40 if number % 2 else 160, 1000, batch_max_tokens=1000)
        core.attach(Member(f"w{number}", build_replica(settings)), 0)
    for handle in range(20):
        core.submit(Sequence(handle, 100 if handle % 2 else 10, 5, adapter=Adapter("a", 2)), 0)
    assert sum(hashed.values()) == 6 + 3


@pytest.mark.parametrize(("count", "total"), [(511, 512), (257, 512), (256, 512), (16, 17), (2, 3)])
def test_a_draw_of_nearly_all_costs_no_more_than_one_of_half(count: int, total: int) -> None:
    rng = CountingGenerator()
    draw = Draw(rng)
    drawn = [draw.some(count, total) for _ in range(64)]
    assert all(len(set(one)) == count and min(one) >= 0 and max(one) < total for one in drawn)
    assert {index for one in drawn for index in one} == set(range(total))
    assert rng.num_drawn <= 64 * max(count, 70) * 2


def test_a_ranking_follows_when_workers_change_though_their_number_does_not() -> None:
    rankings = Rankings(3)
    assert {rankings.head("a", fleet(3))[0], rankings.head("a", fleet(3)[::-1])[0]} in ({0, 2}, {1})


@pytest.mark.parametrize("name", SHARDED)
def test_the_requests_of_an_adapter_share_its_homes_and_take_more_when_they_are_full(name: str) -> None:
    among = fleet(16)
    placement = PLACEMENTS[name](np.random.default_rng(1), PlacementOptions(2, 1))
    for handle in range(64):
        adapter = f"a{handle}"
        for _ in range(2):
            chosen = placement.place(request(handle, adapter), among).candidate
            assert isinstance(chosen, Worker)
            chosen.figures["num_running"] += 1
            chosen.adapters |= {adapter}
    assert max(len(worker.adapters) for worker in among) <= 20
    hot = Counter[str]()
    for handle in range(400):
        chosen = placement.place(request(handle, "hot"), among).candidate
        assert isinstance(chosen, Worker)
        if chosen.num_running < SEATS:
            chosen.figures["num_running"] += 1
        else:
            chosen.figures["num_waiting"] += 1
        chosen.adapters |= {"hot"}
        hot[chosen.name] += 1
    loads = [worker.num_waiting + worker.num_running for worker in among]
    assert len(hot) >= 12
    assert max(loads) <= 1.5 * sum(loads) / len(loads)


@pytest.mark.parametrize("name", SHARDED)
def test_a_placement_looks_at_a_few_workers_however_many_there_are(name: str) -> None:
    rng = np.random.default_rng(1)
    among = fleet(512)
    for worker in among:
        worker.figures["num_running"] = int(rng.integers(8, 13))
    placement = PLACEMENTS[name](rng)
    for handle in range(100):
        placement.place(request(handle, f"a{handle}"), among)
    assert sum(worker.num_looks for worker in among) < 100 * 12


@given(workers, names | st.none(), options)
def test_the_decision_log_shows_the_greatest_score_where_the_request_went(
    made_of: list[tuple[Any, ...]], adapter: str | None, chosen: PlacementOptions
) -> None:
    among = [Worker(*one) for one in made_of]
    choice = Weighted(np.random.default_rng(1), chosen).place(request(1, adapter), among)
    best = max(choice.scores, key=lambda score: (score.total, -score.load))
    assert best.name == choice.candidate.name
    for score in choice.scores:
        total = sum(getattr(chosen.weights, name) * value for name, value in score.terms.items())
        assert score.total == pytest.approx(total)
        assert all(0 <= value <= 1 for value in score.terms.values())
        assert f"{score.total:.3f}" in choice.why
        assert score is best or score.name in choice.why


@given(workers, names | st.none(), options, st.floats(1.01, 4))
def test_no_score_outweighs_a_load_over_the_bound(
    made_of: list[tuple[Any, ...]], adapter: str | None, chosen: PlacementOptions, factor: float
) -> None:
    among, bounded = [Worker(*one) for one in made_of], replace(chosen, max_load=factor)
    choice = Weighted(np.random.default_rng(1), bounded).place(request(1, adapter), among)
    loads = [score.load for score in choice.scores]
    share = factor * (sum(loads) + 1) / len(loads)
    within = [score for score in choice.scores if score.load <= min(loads) + 1 or score.load < share]
    assert choice.candidate.name == max(within, key=lambda score: (score.total, -score.load)).name


def test_a_worker_that_has_the_prompt_cached_gets_no_more_than_its_bound() -> None:
    hot, other = Worker("hot", 0, 7, cached=20), Worker("other", 0, 1)
    for max_load, expected in ((inf, hot), (2.0, hot), (1.5, other)):
        placement = Weighted(np.random.default_rng(1), PlacementOptions(2, 9, Weights(), max_load))
        assert placement.place(request(1, None), [hot, other]).candidate is expected, max_load


@pytest.mark.parametrize(("produced_tokens", "share"), [(0, 0.8), (30, 0.5)])
def test_the_prefix_score_is_a_share_of_all_that_is_to_be_computed(produced_tokens: int, share: float) -> None:
    sequence = Sequence(1, 50, 40, produced_tokens=produced_tokens)  # resumed: its output is part of its input
    choice = Weighted(np.random.default_rng(1)).place(sequence, [Worker("w", cached=40)])
    assert choice.scores[0].terms["prefix"] == pytest.approx(share)


def test_each_weight_decides_where_it_is_the_only_one() -> None:
    far, near = Worker("far", 5, 20), Worker("near", 0, 0)
    ways = {
        "queue": (Worker("x", 3, 1), Worker("y", 2, 9)),
        "load": (Worker("x", 5, 1), Worker("y", 0, 5)),
        "adapter": (near, Worker("y", 9, 9, frozenset("a"))),
        "prefix": (near, Worker("y", 9, 9, cached=20)),
    }
    for term, (other, expected) in ways.items():
        weights = Weights(**{name: float(name == term) for name in ("queue", "load", "adapter", "prefix")})
        placement = Weighted(np.random.default_rng(1), PlacementOptions(2, 9, weights))
        assert placement.place(request(1, "a"), [other, expected]).candidate is expected, term
    assert Weighted(np.random.default_rng(1)).place(request(1, "a"), [far, near]).candidate is near
