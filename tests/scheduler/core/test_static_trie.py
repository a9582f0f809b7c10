"""The static trie against a plain model of llm-mock's rule, and where it must not break."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.prefix_cache import PrefixCache, StaticTrie

PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=25)


def kept_by_the_rule(prompts: list[list[int]], max_tokens: int | None) -> set[tuple[int, ...]]:
    """The rule as it is stated, on explicit paths: slow and obvious."""
    count = Counter(tuple(prompt[:depth]) for prompt in prompts for depth in range(1, len(prompt) + 1))
    kept: set[tuple[int, ...]] = set()
    while max_tokens is None or len(kept) < max_tokens:
        frontier = [path for path in count if path not in kept and (len(path) == 1 or path[:-1] in kept)]
        if not frontier:
            break
        kept.add(min(frontier, key=lambda path: (-count[path], path[-1], len(path), path)))
    return kept


@given(PROMPTS, st.none() | st.integers(0, 60))
def test_keeps_the_nodes_that_the_stated_rule_keeps(prompts, max_tokens):
    trie = StaticTrie.build(prompts, max_tokens)

    assert set(trie.paths()) == kept_by_the_rule(prompts, max_tokens)
    assert trie.num_tokens == len(trie.paths())


@given(PROMPTS, st.integers(0, 60), st.lists(st.integers(0, 3), max_size=10))
def test_match_is_the_longest_leading_run_of_kept_tokens(prompts, max_tokens, query):
    trie = StaticTrie.build(prompts, max_tokens)
    kept = set(trie.paths())

    longest = max((depth for depth in range(1, len(query) + 1) if tuple(query[:depth]) in kept), default=0)
    assert trie.match(query, None) == longest


@given(PROMPTS, st.integers(0, 60), st.randoms(use_true_random=False))
def test_order_of_the_prompts_does_not_matter(prompts, max_tokens, rng: random.Random):
    shuffled = list(prompts)
    rng.shuffle(shuffled)

    assert StaticTrie.build(shuffled, max_tokens).paths() == StaticTrie.build(prompts, max_tokens).paths()


def test_ties_go_to_the_smaller_token_then_the_shorter_path_then_the_first_path():
    # Six nodes of count 1: roots 5 and 7, and below each a 1 and under that a 1.
    prompts = [[5, 1, 1], [7, 1, 1]]

    order = [StaticTrie.build(prompts, size).paths() for size in range(1, 7)]
    added = [set(after) - set(before) for before, after in zip([[], *order], order, strict=False)]
    assert added == [{(5,)}, {(5, 1)}, {(5, 1, 1)}, {(7,)}, {(7, 1)}, {(7, 1, 1)}]

    # Under both roots first, a 1 of length two goes before the 1 of length three, and (5, 1) before (7, 1).
    prompts = [[5, 1, 1], [7, 1, 1], [5], [7]]
    order = [StaticTrie.build(prompts, size).paths() for size in range(1, 7)]
    added = [set(after) - set(before) for before, after in zip([[], *order], order, strict=False)]
    assert added == [{(5,)}, {(7,)}, {(5, 1)}, {(7, 1)}, {(5, 1, 1)}, {(7, 1, 1)}]


def test_adapters_share_one_cache():
    trie: PrefixCache = StaticTrie.build([[1, 2, 3]])

    assert trie.match([1, 2, 4], "alpaca") == trie.match([1, 2, 4], None) == 2


def test_a_fully_cached_prompt_matches_to_its_end():
    assert StaticTrie.build([[1, 2, 3]]).match([1, 2, 3], None) == 3


def test_an_empty_cache_matches_nothing():
    for trie in (StaticTrie.build([]), StaticTrie.build([[], []]), StaticTrie.build([[1, 2]], max_tokens=0)):
        assert trie.num_tokens == 0
        assert trie.match([1, 2], None) == 0
        assert trie.match([], None) == 0


def test_long_prompts_neither_recurse_nor_blow_up():
    system_prompt = list(range(20_000))
    prompts = [[*system_prompt, user, user, user] for user in range(50)]

    trie = StaticTrie.build(prompts, max_tokens=20_010)

    assert trie.num_tokens == 20_010
    assert trie.match(prompts[0], None) == 20_003
    assert trie.match(system_prompt, None) == 20_000


def test_only_the_frontier_is_looked_at():
    prompts = [[user, *range(10_000)] for user in range(200)]  # two million nodes, of which five are kept

    # Token ids: 0, then 0 below it, then the roots 1 and (0, 0, 1) in this order, then 1's child 0.
    expected = [(0,), (0, 0), (0, 0, 1), (1,), (1, 0)]
    assert StaticTrie.build(prompts, max_tokens=5).paths() == expected


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="max_tokens is -1"):
        StaticTrie.build([], max_tokens=-1)
