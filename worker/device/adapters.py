"""Adapters used by the batch, kept up to date as sequences join and leave, as the sums that a step-time model needs."""

from collections.abc import Iterable

from lorrery.worker.device.batch import NO_LORA, LoraWork
from lorrery.worker.device.rows import DeviceSequence


class DecodingAdapters:
    """The adapters of the decoding sequences.

    Sequences of one adapter key have one rank: a key names an adapter in one version. Cost: O(1) per sequence that
    joins or leaves, O(distinct ranks) for the sums.
    """

    def __init__(self) -> None:
        self._users: dict[str, int] = {}  # adapter -> sequences
        self._ranks: dict[int, int] = {}  # rank -> adapters
        self._rank_sum = self._num_users = self._rank_users = 0
        self._work: LoraWork | None = NO_LORA

    def add(self, sequence: DeviceSequence) -> None:
        """Count a sequence that begins to decode."""
        if not sequence.adapter_key:
            return
        rank, users = sequence.adapter_rank, self._users.get(sequence.adapter_key, 0)
        self._users[sequence.adapter_key] = users + 1
        if not users:
            self._rank_sum += rank
            self._ranks[rank] = self._ranks.get(rank, 0) + 1
        self._num_users += 1
        self._rank_users += rank
        self._work = None

    def remove(self, sequence: DeviceSequence) -> None:
        """Remove a sequence that was counted."""
        if not sequence.adapter_key:
            return
        rank, users = sequence.adapter_rank, self._users[sequence.adapter_key]
        if users > 1:
            self._users[sequence.adapter_key] = users - 1
        else:
            del self._users[sequence.adapter_key]
            self._rank_sum -= rank
            self._ranks[rank] -= 1
            if not self._ranks[rank]:
                del self._ranks[rank]
        self._num_users -= 1
        self._rank_users -= rank
        self._work = None

    @property
    def work(self) -> LoraWork:
        """The adapters' work in a step of decodes alone."""
        if self._work is None:
            self._work = self._sums(len(self._users), self._rank_sum, 0, self._num_users, self._rank_users)
        return self._work

    def work_with(self, prefills: Iterable[tuple[DeviceSequence, int]], *, decode: bool) -> LoraWork:
        """Return the adapters' work in a step that also computes prompt chunks.

        Args:
            prefills: (sequence, its new tokens) of each chunk.
            decode: whether the decoding sequences take part.
        """
        there = self._users if decode else {}
        newcomers: dict[str, int] = {}  # adapter -> rank, for adapters of no decoding sequence
        num_tokens = rank_tokens = 0
        for sequence, new_tokens in prefills:
            if sequence.adapter_key:
                num_tokens += new_tokens
                rank_tokens += sequence.adapter_rank * new_tokens
                if sequence.adapter_key not in there:
                    newcomers[sequence.adapter_key] = sequence.adapter_rank
        if not newcomers and not there:
            return NO_LORA
        rank_sum = max_rank = 0
        for rank in newcomers.values():
            rank_sum += rank
            max_rank = max(max_rank, rank)
        if not decode:
            return LoraWork(len(newcomers), rank_sum, max_rank, num_tokens, rank_tokens)
        return self._sums(
            len(self._users) + len(newcomers),
            self._rank_sum + rank_sum,
            max_rank,
            self._num_users + num_tokens,
            self._rank_users + rank_tokens,
        )

    def _sums(self, num_adapters: int, rank_sum: int, max_rank: int, num_tokens: int, rank_tokens: int) -> LoraWork:
        if not num_adapters:
            return NO_LORA
        for rank in self._ranks:
            if rank > max_rank:
                max_rank = rank
        return LoraWork(num_adapters, rank_sum, max_rank, num_tokens, rank_tokens)
