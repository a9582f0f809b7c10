import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.loadgen.workload import arrivals
from lorrery.loadgen.workload.arrivals import again_and_again, warmup_requests
from lorrery.loadgen.workload.conversations import ChatShape, chat, share_prefixes
from lorrery.loadgen.workload.prompts import prompt_token_ids
from lorrery.loadgen.workload.request import WorkloadRequest, sessions


def drawn(num_sessions=20, seed=1, *, turns=(1, 5), think=3.0, shared=None):
    rng = np.random.default_rng(seed)
    made = chat(arrivals.poisson(2.0, num_sessions, rng), ChatShape(turns, (1, 40), (1, 30), think), rng)
    return made if shared is None else share_prefixes(made, *shared, np.random.default_rng(9))


def answer(request):
    return np.full(request.output_tokens, 7, np.uint32)


@given(st.integers(0, 2**32), st.booleans())
def test_a_turns_prompt_is_the_whole_conversation_and_its_own_words(seed, is_shared):
    workload = drawn(5, seed, shared=(16, 2) if is_shared else None)
    assert [request.index for request in workload] == list(range(len(workload)))
    for turns in sessions(workload):
        said = []
        before = np.empty(0, np.uint32)
        for number, request in enumerate(turns):
            prompt = prompt_token_ids(request, 3, said)
            assert len(prompt) == request.prompt_tokens
            assert prompt[: len(before)].tolist() == before.tolist()
            assert (request.turn.number, request.at_seconds) == (number, turns[0].at_seconds)
            said.append((request, answer(request)))
            before = np.concatenate([prompt, answer(request)])


def test_equal_seeds_give_equal_sessions_and_others_do_not():
    assert drawn(seed=4) == drawn(seed=4)
    assert drawn(seed=4) != drawn(seed=5)


def test_lengths_and_think_times_are_those_asked_for():
    workload = drawn(4000, turns=(2, 4))
    counts = [len(turns) for turns in sessions(workload)]
    assert set(counts) == {2, 3, 4}
    assert np.mean(counts) == pytest.approx(3, abs=0.05)
    thinks = [request.turn.think_seconds for request in workload if request.turn.number]
    assert np.mean(thinks) == pytest.approx(3.0, rel=0.05)
    assert np.std(thinks) == pytest.approx(3.0, rel=0.06)  # exponential
    assert all(request.turn.think_seconds == 0 for request in workload if not request.turn.number)
    assert np.mean([request.turn.own_tokens for request in workload]) == pytest.approx(20.5, rel=0.03)


def test_shared_parts_are_equal_within_a_group_and_change_nothing_else():
    plain, shared = drawn(200), drawn(200, shared=(32, 3))
    by_group = {}
    for one, other in zip(plain, shared, strict=True):
        assert (other.at_seconds, other.output_tokens) == (one.at_seconds, one.output_tokens)
        assert other.prompt_tokens == one.prompt_tokens + 32
        if not other.turn.number:
            prompt = prompt_token_ids(other, 1)
            by_group.setdefault(other.turn.shared_group, []).append(prompt)
            assert prompt[32:].tolist() == prompt_token_ids(one, 1).tolist()
    assert sorted(by_group) == [0, 1, 2]
    starts = [{tuple(prompt[:32].tolist()) for prompt in prompts} for prompts in by_group.values()]
    assert [len(start) for start in starts] == [1, 1, 1]
    assert len(set.union(*starts)) == 3
    assert min(map(len, by_group.values())) > 40  # of 200 in 3, drawn uniformly


def test_plain_requests_can_share_a_prefix_too():
    rng = np.random.default_rng(0)
    plain = arrivals.synthetic(arrivals.poisson(1.0, 10, rng), (5, 9), (1, 2), rng)
    shared = share_prefixes(plain, 8, 1, rng)
    prompts = [prompt_token_ids(request, 2) for request in shared]
    assert len({tuple(prompt[:8].tolist()) for prompt in prompts}) == 1
    assert len({tuple(prompt[8:].tolist()) for prompt in prompts}) == 10
    assert [len(prompt) for prompt in prompts] == [request.prompt_tokens for request in shared]


def test_a_turn_that_does_not_fit_takes_those_after_it_along():
    turns = drawn(1, turns=(4, 4))
    limit = turns[1].prompt_tokens + turns[1].output_tokens
    other = WorkloadRequest(9, 0.0, limit + 1, 1)
    assert arrivals.fitting([*turns, other], limit, limit) == turns[:2]


def test_played_again_sessions_have_other_words():
    workload = drawn(3, turns=(2, 2))
    stream = again_and_again(workload)
    rounds = [[next(stream) for _ in workload] for _ in range(2)]
    assert rounds[0] == workload
    assert [len(turns) for turns in sessions([*rounds[0], *rounds[1]])] == [2] * 6
    assert prompt_token_ids(rounds[0][0], 1).tolist() != prompt_token_ids(rounds[1][0], 1).tolist()


def test_the_warm_up_of_sessions_is_of_single_requests():
    assert [request.turn for request in warmup_requests(drawn(3, turns=(2, 2)), 3)] == [None] * 3


def test_a_warm_up_longer_than_the_workload_repeats_it():
    workload = drawn(3)
    short = warmup_requests(workload, len(workload) + 2)
    assert len({request.index for request in short}) == len(workload) + 2
    assert [request.prompt_tokens for request in short[-2:]] == [request.prompt_tokens for request in workload[:2]]


def test_twice_as_fast_halves_send_and_think_times():
    workload = drawn(3, turns=(2, 2))
    for slow, fast in zip(workload, arrivals.scale(workload, 2.0), strict=True):
        assert fast.at_seconds == slow.at_seconds / 2
        assert fast.turn.think_seconds == slow.turn.think_seconds / 2


@pytest.mark.parametrize("field", ["turns", "input_range", "output_range"])
def test_an_empty_range_is_refused(field):
    ranges = {"turns": (1, 2), "input_range": (1, 2), "output_range": (1, 2), field: (3, 2)}
    with pytest.raises(ValueError, match=field):
        ChatShape(**ranges, think_seconds=1.0)
