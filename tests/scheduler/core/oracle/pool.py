"""The oracle of a prefix cache with `share_within_plan`: each physical block by itself, as vLLM keeps them.

A block that is full and scheduled has a key: its adapter, and all tokens up to its end. Look-ups find the block that
has had a key for longest. A block that no sequence holds waits at the end of a line, and is evicted from its front.
"""

from collections.abc import Sequence as Tokens

from lorrery.scheduler.core.prefix_cache.base import SharedBlocks
from lorrery.scheduler.core.prefix_cache.extents import root_name
from lorrery.scheduler.core.sequence import Sequence

Key = tuple[str | None, tuple[int, ...]]


class Block:
    """A physical block with a key."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.pins = 1


class Pool(SharedBlocks):
    """The cached blocks of one worker.

    Args:
        block_size: tokens in a block.
        min_computed_tokens: tokens of an input that are computed even if all are cached.
    """

    def __init__(self, block_size: int = 16, *, min_computed_tokens: int = 1) -> None:
        super().__init__(share_within_plan=True)
        self.block_size = block_size
        self.min_computed_tokens = min_computed_tokens
        self._by_key: dict[Key, list[Block]] = {}
        self._line: list[Block] = []
        self._held: dict[Sequence, list[Block]] = {}
        self._decoding: dict[Sequence, None] = {}

    def _tokens(self, sequence: Sequence, num_output: int) -> list[int]:
        tokens = list(sequence.prompt_token_ids)
        if len(tokens) < sequence.prompt_tokens:
            return tokens
        return tokens + list(sequence.output_token_ids[:num_output])

    def _key(self, name: str | None, tokens: Tokens[int], block: int) -> Key:
        return name, tuple(tokens[: (block + 1) * self.block_size])

    def _walk(self, name: str | None, tokens: Tokens[int], most: int) -> list[Block]:
        found: list[Block] = []
        for block in range(min(most, len(tokens)) // self.block_size):
            blocks = self._by_key.get(self._key(name, tokens, block))
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def _found(self, sequence: Sequence) -> list[Block]:
        self._grow()
        tokens = self._tokens(sequence, sequence.produced_tokens)
        return self._walk(_name(sequence), tokens, sequence.input_tokens - self.min_computed_tokens)

    def _grow(self, *, scheduled: bool = True, before: int | None = None) -> None:
        """Give keys to the blocks that output has filled since; who is ahead has filled a block before others.

        The newest token of a sequence is computed in the step that has been `scheduled`; for those that entered after
        number `before`, not yet.
        """
        if self.running is None:
            return
        step = self.running.decode_step - (not scheduled)
        unseen = self.unseen_tokens if scheduled else 0
        filled = {one: one.input_tokens + one.output_tokens_at(step) - unseen for one in self._decoding}
        if before is not None:
            filled = {one: num - (one.entered > before) for one, num in filled.items()}
        for sequence in sorted(filled, key=lambda one: (-filled[one], one.entered)):
            num_output = filled[sequence] - sequence.prompt_tokens
            self._publish(sequence, self._tokens(sequence, num_output), filled[sequence])

    def _publish(self, sequence: Sequence, tokens: list[int], num_tokens: int) -> None:
        held = self._held[sequence]
        while len(held) < min(num_tokens, len(tokens)) // self.block_size:
            block = Block(self._key(_name(sequence), tokens, len(held)))
            self._by_key.setdefault(block.key, []).append(block)
            held.append(block)
        self._count()

    def _count(self) -> None:
        held = [block for blocks in self._held.values() for block in blocks]
        self.num_pins, self.num_pinned, self.num_unpinned = len(held), len(set(held)), len(self._line)

    def match(self, token_ids: Tokens[int], name: str | None) -> int:
        self._grow()
        return len(self._walk(name, list(token_ids), len(token_ids))) * self.block_size

    def reusable(self, sequence: Sequence) -> int:
        return len(self._found(sequence)) * self.block_size

    def num_shareable(self, sequence: Sequence) -> int:
        return sum(block.pins > 0 for block in self._found(sequence))

    def acquire(self, sequence: Sequence) -> None:
        found = self._found(sequence)[: sequence.cached_tokens // self.block_size]
        for block in found:
            if not block.pins:
                self._line.remove(block)
            block.pins += 1
        self._held[sequence] = found
        self._count()

    def schedule(self, sequence: Sequence, num_tokens: int) -> None:
        self._grow(before=sequence.entered)
        self._publish(sequence, self._tokens(sequence, sequence.produced_tokens), num_tokens)

    def commit(self, sequence: Sequence) -> None:
        self._grow(scheduled=False)
        self._publish(sequence, self._tokens(sequence, sequence.produced_tokens), sequence.computed_tokens)
        if sequence.computed_tokens >= sequence.input_tokens:
            self._decoding[sequence] = None

    def resume(self, sequence: Sequence) -> None:
        self._decoding.pop(sequence, None)
        self._grow(scheduled=False)
        self._publish(sequence, self._tokens(sequence, sequence.produced_tokens), sequence.computed_tokens)

    def shows_alone(self, sequence: Sequence) -> bool:
        return False

    def release(self, sequence: Sequence, output_tokens: int) -> None:
        self._decoding.pop(sequence, None)
        self._grow(scheduled=False)
        num_output = sequence.produced_tokens + max(0, output_tokens - 1)
        cached_tokens = sequence.computed_tokens + max(0, output_tokens - 1)
        self._publish(sequence, self._tokens(sequence, num_output), cached_tokens)
        for block in reversed(self._held.pop(sequence)):
            block.pins -= 1
            if not block.pins:
                self._line.append(block)
        self._count()

    def shrink(self, spare_tokens: int) -> None:
        while len(self._line) > max(0, spare_tokens) // self.block_size:
            block = self._line.pop(0)
            self._by_key[block.key].remove(block)
            if not self._by_key[block.key]:
                del self._by_key[block.key]
            self.num_evictions += 1
        self._count()

    def lose(self) -> None:
        self._by_key.clear()
        self._line.clear()
        self._held.clear()
        self._decoding.clear()
        self._count()

    def paths(self) -> list[tuple[str | None, tuple[int, ...], int]]:
        """List every block, as `BlockCache.paths`."""
        self._grow()
        pinned = [(*block.key, block.pins) for blocks in self._by_key.values() for block in blocks if block.pins]
        pinned.sort(key=lambda path: (path[0] or "", path[1]))
        return pinned + [(*block.key, 0) for block in self._line]


def _name(sequence: Sequence) -> str | None:
    return root_name(None if sequence.adapter is None else sequence.adapter.key, sequence.cache_salt)
