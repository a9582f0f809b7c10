"""llm-mock's prefix cache: a trie of known prompts, pruned once to a size and never changed again.

Every node is one cached token: the last of a path of tokens from the root. Its count is the number of prompts that pass
through it. Exactly min(max_tokens, all) nodes are kept, by repeatedly taking the *frontier* node (one that is not kept,
and whose parent is kept or is the root) with the highest count.

Ties go to the smaller token id, as in llm-mock (dongmingli-Ben/llm-mock, whose order ends there); then to the shorter
path, then to the path that comes first token by token. So the order is total: the same prompts in any order give the
same cache.

The whole trie is never built. With the prompts sorted, a node is a range of them that share their first `depth` tokens,
and its children are the sub-ranges that share the next token. Only frontier nodes are ever visited: memory beside the
prompts follows the size of the result, and nothing recurses, however long a prompt is.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.sequence import Sequence as Request

_ROOT = 0


class _Frontier(NamedTuple):
    """A node that may be kept next; tuple order is the order in which nodes are kept.

    Two frontier nodes of the same depth have disjoint ranges, and ranges are ordered as paths are, so `first` settles
    every tie and the fields after it are never compared.
    """

    minus_count: int
    token_id: int
    depth: int
    first: int  # the node's prompts are sorted_prompts[first:end]
    end: int
    parent: int


class StaticTrie(PrefixCache):
    """A fixed set of cached prompt prefixes, the same for all adapters, as in llm-mock."""

    def __init__(self, edges: dict[tuple[int, int], int]) -> None:
        """Take a finished trie; use `build` to make one.

        Args:
            edges: (parent node, token id) -> child node. The root is 0, and a child's number is above its parent's.
        """
        super().__init__()
        self._edges = edges

    @classmethod
    def build(
        cls,
        prompts: Iterable[Sequence[int]],
        max_tokens: int | None = None,
        on_kept: Callable[[int], None] = lambda num_kept: None,
    ) -> Self:
        """Make the cache from known prompts.

        Takes O(P log P) comparisons of prompts and O(K log K) steps for P prompts and K nodes on the frontier.

        Args:
            prompts: token ids of each; one that occurs twice counts twice, an empty one adds nothing.
            max_tokens: how many cached tokens (nodes) to keep, >= 0; None keeps all.
            on_kept: called after each kept node, with the number kept so far.

        Raises:
            ValueError: max_tokens is negative.
        """
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 0")
        sorted_prompts = sorted(tuple(prompt) for prompt in prompts)
        edges: dict[tuple[int, int], int] = {}
        frontier = list(_children(sorted_prompts, 0, len(sorted_prompts), depth=0, parent=_ROOT))
        heapq.heapify(frontier)
        while frontier and (max_tokens is None or len(edges) < max_tokens):
            kept = heapq.heappop(frontier)
            node = len(edges) + 1
            edges[kept.parent, kept.token_id] = node
            on_kept(node)
            for child in _children(sorted_prompts, kept.first, kept.end, kept.depth, node):
                heapq.heappush(frontier, child)
        return cls(edges)

    @classmethod
    def of_nodes(cls, parents: Sequence[int], token_ids: Sequence[int]) -> Self:
        """Make the cache from the result of `nodes`.

        Raises:
            ValueError: the lengths differ, a parent does not come before its child, or two children are equal.
        """
        edges: dict[tuple[int, int], int] = {}
        for node, (parent, token_id) in enumerate(zip(parents, token_ids, strict=True), start=1):
            if not 0 <= parent < node or (parent, token_id) in edges:
                raise ValueError(f"node {node} (parent {parent}, token {token_id}) cannot be")
            edges[parent, token_id] = node
        return cls(edges)

    def nodes(self) -> tuple[list[int], list[int]]:
        """Return parent and token id of each node, in order of nodes; the first is node 1, the root is 0."""
        return [parent for parent, _ in self._edges], [token_id for _, token_id in self._edges]

    @property
    def num_tokens(self) -> int:
        """Number of cached tokens, which is the number of nodes without the root."""
        return len(self._edges)

    def match(self, token_ids: Sequence[int], adapter_key: str | None = None, cache_salt: str = "") -> int:
        """Count the leading tokens of a prompt that are cached; mutates nothing.

        Args:
            token_ids: the prompt, in order.
            adapter_key: ignored; llm-mock has no adapters.
            cache_salt: with one, nothing is cached: the corpus has none.

        Returns:
            A length in 0..len(token_ids), in as many steps.
        """
        del adapter_key
        if cache_salt:
            return 0
        node = _ROOT
        for position, token_id in enumerate(token_ids):
            child = self._edges.get((node, token_id))
            if child is None:
                return position
            node = child
        return len(token_ids)

    # --- as a replica's cache: only looking means anything ------------------------------------------------------------

    def reusable(self, sequence: Request) -> int:
        """Count the leading prompt tokens that are cached; earlier output is never found."""
        return self.match(sequence.prompt_token_ids, cache_salt=sequence.cache_salt)

    def acquire(self, sequence: Request) -> None:
        """Pin nothing: nothing is ever evicted."""

    def commit(self, sequence: Request) -> None:
        """Add nothing: the cache is fixed."""

    def shows_alone(self, sequence: Request) -> bool:
        """Return True: it publishes nothing."""
        return True

    def release(self, sequence: Request, output_tokens: int) -> None:
        """Keep nothing: the cache is fixed."""

    def shrink(self, spare_tokens: int) -> None:
        """Evict nothing: the cache takes no place."""

    def lose(self) -> None:
        """Forget nothing: the cache is fixed."""

    # --- inspection -------------------------------------------------------------------------------------------------

    def paths(self) -> list[tuple[int, ...]]:
        """List every cached prefix as its token ids, depth-first with children in token order.

        Meant for inspection: it takes the sum of all path lengths in time and memory.
        """
        path_of: dict[int, tuple[int, ...]] = {_ROOT: ()}
        for (parent, token_id), node in self._edges.items():
            path_of[node] = (*path_of[parent], token_id)
        del path_of[_ROOT]
        return sorted(path_of.values())


def _children(
    sorted_prompts: Sequence[tuple[int, ...]], first: int, end: int, depth: int, parent: int
) -> Iterator[_Frontier]:
    """Yield the children of the node whose prompts are sorted_prompts[first:end], in token order.

    Args:
        sorted_prompts: every prompt, in order.
        first: first prompt of the range; all in it share their first `depth` tokens.
        end: one past the last prompt of the range.
        depth: length of the node's path.
        parent: the node's number.
    """
    # Prompts that end here sort before those that go on.
    first = bisect_right(sorted_prompts, False, first, end, key=lambda prompt: len(prompt) > depth)
    while first < end:
        token_id = sorted_prompts[first][depth]
        # Most nodes of a long prompt have one child: try the end of the range before searching for the border.
        if sorted_prompts[end - 1][depth] == token_id:
            border = end
        else:
            border = bisect_left(sorted_prompts, token_id + 1, first, end, key=lambda prompt: prompt[depth])
        yield _Frontier(first - border, token_id, depth + 1, first, border, parent)
        first = border
