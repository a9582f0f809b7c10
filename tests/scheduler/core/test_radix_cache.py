"""SGLang's prefix cache: what counts as a use, where nodes are split, and that leaves go whole."""

import pytest

from lorrery.scheduler.core.prefix_cache.radix import RadixCache
from lorrery.scheduler.core.sequence import Adapter, Sequence


def sequence(handle: int, prompt: list[int], output: list[int] | None = None, adapter: str | None = None) -> Sequence:
    return Sequence(
        handle,
        len(prompt),
        len(output or [0]),
        adapter=None if adapter is None else Adapter(adapter, 1),
        prompt_token_ids=prompt,
        output_token_ids=output or [],
    )


def enter(cache: RadixCache, one: Sequence) -> None:
    one.cached_tokens = one.computed_tokens = cache.touch(one)
    cache.acquire(one)


def run(cache: RadixCache, one: Sequence, output_tokens: int = 1) -> None:
    """Let a sequence enter, compute its prompt and leave."""
    enter(cache, one)
    one.computed_tokens = one.input_tokens
    cache.commit(one)
    cache.release(one, output_tokens)


def test_the_least_recently_used_leaf_goes_whole_even_if_less_is_missing():
    cache = RadixCache()
    run(cache, sequence(1, [1, 2, 3, 4, 5]))
    run(cache, sequence(2, [7, 8, 9]))
    cache.shrink(7)
    assert (cache.num_unpinned, cache.num_evictions) == (3, 5)
    assert cache.match([7, 8, 9], None) == 3


def test_a_look_up_for_admission_counts_as_a_use_and_any_other_does_not():
    for touch in (False, True):
        cache = RadixCache()
        run(cache, sequence(1, [1, 2, 3]))
        run(cache, sequence(2, [7, 8, 9]))
        waiting = sequence(3, [1, 2, 3, 4])
        assert cache.reusable(waiting) == cache.match([1, 2, 3, 4], None) == 3
        if touch:
            assert cache.touch(waiting) == 3
        cache.shrink(5)
        assert cache.match([1, 2, 3], None) == (3 if touch else 0)


@pytest.mark.parametrize(
    ("prompt", "found"), [([9, 9], 0), ([1, 2, 9], 2), ([1, 2, 3, 4, 5, 6], 2), ([1, 2, 3, 4, 9, 9], 1)]
)
def test_what_would_be_pinned_anew_is_the_part_found_that_no_sequence_uses(prompt: list[int], found: int):
    cache = RadixCache()
    run(cache, sequence(1, [1, 2, 3, 4, 5]))
    assert cache.num_unpinned_found(sequence(2, [1, 2, 9])) == 2
    if len(prompt) > 3:
        enter(cache, sequence(3, [1, 2, 3, 9]))  # it pins the first three
    assert cache.num_unpinned_found(sequence(4, prompt)) == found


def test_a_node_is_split_where_an_input_leaves_it_and_the_rest_may_go_alone():
    cache = RadixCache()
    run(cache, sequence(1, [1, 2, 3, 4, 5]))
    assert cache.touch(sequence(2, [1, 2, 9, 9])) == 2
    cache.shrink(4)
    assert cache.match([1, 2, 3, 4, 5], None) == 2


def test_output_is_a_node_of_its_own_and_goes_before_the_prompt():
    cache = RadixCache()
    run(cache, sequence(1, [1, 2, 3], [4, 5, 6]), output_tokens=3)
    assert cache.match([1, 2, 3, 4, 5, 6], None) == 5  # the last token is never cached
    cache.shrink(4)
    assert cache.match([1, 2, 3, 4, 5], None) == 3


def test_the_last_token_of_an_input_is_looked_up_for_the_order_only():
    cache = RadixCache()
    run(cache, sequence(1, [1, 2, 3]))
    again = sequence(2, [1, 2, 3])
    assert cache.touch(again, whole=True) == 3
    assert cache.touch(again) == 2


def test_pages_are_whole():
    cache = RadixCache(page_size=4)
    run(cache, sequence(1, [1, 2, 3, 4, 5, 6]))
    assert (cache.num_unpinned, cache.match([1, 2, 3, 4, 5, 6], None)) == (1, 4)


def test_a_chunk_is_inserted_when_the_next_step_is_decided_and_is_pinned():
    cache = RadixCache()
    one = sequence(1, [1, 2, 3, 4])
    enter(cache, one)
    one.computed_tokens = 2
    cache.commit(one)
    assert cache.match([1, 2], None) == 0
    cache.publish(one)
    cache.publish(one)
    assert (cache.match([1, 2], None), cache.num_pinned, cache.num_unpinned) == (2, 2, 0)


def test_what_is_withheld_is_not_inserted_and_what_was_found_is_unpinned():
    cache = RadixCache()
    run(cache, sequence(1, [1, 2, 3]))
    one = sequence(2, [1, 2, 3, 4, 5], [6, 7])
    enter(cache, one)
    one.computed_tokens = 5
    cache.withhold(one)
    cache.release(one, 2)
    assert (cache.num_unpinned, cache.num_pinned, cache.num_pins) == (3, 0, 0)
    assert cache.match([1, 2, 3, 4, 5], None) == 3


def test_adapters_share_nothing():
    cache = RadixCache()
    run(cache, sequence(1, [1, 2, 3], adapter="a"))
    assert cache.touch(sequence(2, [1, 2, 3, 4], adapter="b")) == 0
    assert cache.touch(sequence(3, [1, 2, 3, 4], adapter="a")) == 3


def test_two_who_compute_the_same_keep_it_once():
    cache = RadixCache()
    first, second = sequence(1, [1, 2, 3]), sequence(2, [1, 2, 3])
    enter(cache, first)
    enter(cache, second)
    for one in (first, second):
        one.computed_tokens = 3
        cache.commit(one)
    assert (cache.num_pinned, cache.num_pins) == (3, 6)
    cache.release(first, 1)
    cache.release(second, 1)
    assert (cache.num_pinned, cache.num_pins, cache.num_unpinned) == (0, 0, 3)
