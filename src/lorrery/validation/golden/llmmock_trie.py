"""`llmmock_trie`: llm-mock's pruned prompt trie, against `scheduler.core.prefix_cache.StaticTrie`.

Where llm-mock's own rule leaves the last places to chance (`tie_ambiguous`), only what every correct trie has in common
is compared: the number of prompts through each kept token, not the tokens themselves.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from lorrery.scheduler.core.prefix_cache import StaticTrie
from lorrery.validation.golden.kind import Mismatch, Record, compare


class LlmMockTrie:
    """Builds the cache from the record's prompts, then runs the record's queries."""

    name = "llmmock_trie"

    def detect(self, record: Record) -> bool:
        """Whether the record has prompts and the edges kept of them."""
        return record.keys() >= {"prompts", "max_edges", "kept_edges", "queries", "tie_ambiguous"}

    def replay(self, record: Record) -> list[Mismatch]:
        """Build, prune and query."""
        prompts = record["prompts"]
        trie = StaticTrie.build(prompts, record["max_edges"])
        found = compare("edges_before_prune", record["edges_before_prune"], StaticTrie.build(prompts).num_tokens)
        if record["tie_ambiguous"]:
            expected_counts = _counts_of(record["kept_edges"], prompts)
            return found + compare("counts of kept_edges", expected_counts, _counts_of(trie.paths(), prompts))
        found += compare("kept_edges", record["kept_edges"], trie.paths())
        for index, (token_ids, first_missing) in enumerate(record["queries"]):
            found += compare(f"query {index} {token_ids}", first_missing, trie.match(token_ids, None))
        return found


def _counts_of(paths: Iterable[Sequence[int]], prompts: Iterable[Sequence[int]]) -> list[int]:
    """Count the prompts through each path, highest count first."""
    through = Counter(tuple(prompt[:depth]) for prompt in prompts for depth in range(1, len(prompt) + 1))
    return sorted((through[tuple(path)] for path in paths), reverse=True)
