"""Queues that prefer some adapters or lengths let a bounded number of sequences overtake; in strict mode any number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.scheduler.core.queues.few_adapters import Cluster, Peft
from lorrery.scheduler.core.queues.pets import Pets
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.policy.drive import jump, step_by_step
from tests.scheduler.core.queues.one_queue import A, B, C, LengthProfile, admitted, replica_of, request, world

PREFERRING = {
    "cluster": lambda **how: Cluster(1, **how),
    "peft": Peft,
    "pets": lambda **how: Pets(LengthProfile(), **how),
}


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
