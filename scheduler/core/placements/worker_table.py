"""The figures of many workers as columns: one array per figure, with a row per worker in order of attaching.

A placement computes with whole columns instead of reading 512 candidates. A member reports a possible change (`touch`)
after each submit, plan, and commit that ends a sequence; its row is written when the columns are read next, once
however often it has changed. A worker's residency reports its adapters on the GPU, its prefix cache the blocks that it
holds.

Between two writes only KV tokens grow, by steps that the worker's driver has perhaps not committed yet. So `kv_tokens`
are lower bounds, as is what follows from them, and a worker that may be the best by them is brought up to date before
it is chosen. The choice is the one that a look at each candidate gives.

For `predicted_finish`, a row has the least time of a further output token there, from figures of the worker alone, in
thousandths of a picosecond:

    token_time = ((base + sequence x (running + waiting + 1) + kv_token x (KV tokens + waiting tokens)) / (1 - prompts)
                  + blocked) x slowdown
    blocked    = (waiting + 1) x (base + sequence x running + kv_token x KV tokens) / running
                 of a worker whose waiting sequences could not start, else 0

with the smaller one of the last and the usual slowdown, since the one that counts lies between them.

Cost, for n workers: one write for each that has changed; some operations on arrays of n numbers, about a microsecond
each, for a choice. Of `FEW` workers each is read instead, which is faster. If prefix caches are read, each worker is
brought up to date whose plan goes on to compute a long prompt: in a fleet with little other work, all of them.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lorrery.scheduler.core.placements.candidate import NO_FORECAST, ReplicaCandidate
from lorrery.scheduler.core.placements.forecast import LEAST_DECODING, ONE
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.holders import PrefixHolders, Way
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.machine_ints import product
from lorrery.worker.device.steptime import Pace

FEW: Final = 8
"""Placements read each of up to this many workers."""
LARGEST: Final = (1 << 63) - 1
_MOST_TIME: Final = (1 << 61) - 1
"""Times are cut off here; such a value is still a lower bound."""

Column = NDArray[np.int64]
Rows = NDArray[np.int64]
"""Numbers of some rows, ascending."""


class WorkerTable:
    """See the module.

    Args:
        candidates: the workers, by row; neither they nor their paces change.

    Attributes:
        candidates: as given.
        num_waiting: sequences in the queue.
        loads: sequences in queue and batch.
        total_load: the sum of the loads.
        kv_tokens: a lower bound on the tokens that the batch holds.
        paces: the different paces of the workers; empty if the placement does not predict.
        pace: index into `paces`.
        token_times: see the module; like what follows, kept only if the placement predicts.
        slowdowns: those in `token_times`, in thousandths.
        blocked_ps: the part `blocked` of the formula.
        most_token_time: no entry of `token_times` is greater.
        most_slowdown: no entry of `slowdowns` is greater.
        have_prefix_caches: whether any worker has one.
    """

    def __init__(self, candidates: tuple[ReplicaCandidate, ...]) -> None:
        num = len(candidates)
        self.candidates = candidates
        self.num_waiting: Column = np.zeros(num, np.int64)
        self.loads: Column = np.zeros(num, np.int64)
        self.total_load = 0
        self.kv_tokens: Column = np.zeros(num, np.int64)
        self.paces: list[Pace] = []
        self.pace: Column = np.zeros(num, np.int64)
        self.token_times: Column = np.zeros(num, np.int64)
        self.slowdowns: Column = np.full(num, ONE, np.int64)
        self.blocked_ps: Column = np.zeros(num, np.int64)
        self.most_token_time = self.most_slowdown = 0
        self.have_prefix_caches = any(candidate.has_prefix_cache for candidate in candidates)
        self._predicts = num > FEW and candidates[0].forecast is not NO_FORECAST
        if self._predicts:
            self.paces = list(dict.fromkeys(candidate.forecast.pace for candidate in candidates))
            self.pace = np.array([self.paces.index(candidate.forecast.pace) for candidate in candidates])
        self._adapters: dict[str, NDArray[np.bool_]] = {}
        self._prefixes: PrefixHolders | None = None
        self._chunking: set[int] = set()
        self._touched = list(range(num))
        self._is_touched = bytearray(b"\1" * num)

    # --- writing ----------------------------------------------------------------------------------------------------

    def touch(self, row: int) -> None:
        """Record that a worker's counts may have changed, or its KV tokens may have decreased."""
        if not self._is_touched[row]:
            self._is_touched[row] = 1
            self._touched.append(row)

    def refresh(self) -> None:
        """Write the rows touched since the last call; required before any column is read."""
        for row in self._touched:
            self._is_touched[row] = 0
            candidate = self.candidates[row]
            load = candidate.load
            self.total_load += load - self.loads.item(row)
            self.loads[row] = load
            self.num_waiting[row] = candidate.num_waiting
            kv_tokens = candidate.least_kv_tokens
            self.kv_tokens[row] = kv_tokens
            if self._predicts:
                self._write_times(row, kv_tokens)
        self._touched.clear()

    def was_read(self, row: int) -> None:
        """Write the KV tokens of a worker that has just been brought up to date, and what follows from them."""
        kv_tokens = self.candidates[row].shown_kv_tokens
        if kv_tokens != self.kv_tokens.item(row):
            self.kv_tokens[row] = kv_tokens
            if self._predicts:
                self._write_times(row, kv_tokens)

    def _write_times(self, row: int, kv_tokens: int) -> None:
        candidate = self.candidates[row]
        forecast = candidate.forecast
        slowdown = max(min(forecast.slowdown, forecast.usual_slowdown, _MOST_TIME), 1)
        base_ps, sequence_ps, kv_token_ps, _ = forecast.pace
        num_running, num_waiting = candidate.num_running, candidate.num_waiting
        step_ps = base_ps + (num_running + num_waiting + 1) * sequence_ps
        step_ps += product(kv_tokens + forecast.waiting_tokens, kv_token_ps)
        token_ps = product(step_ps, ONE) // max(ONE - forecast.prompt_share, LEAST_DECODING)
        blocked_ps = 0
        if num_waiting and num_running and candidate.is_blocked:
            running_ps = base_ps + num_running * sequence_ps + product(kv_tokens, kv_token_ps)
            blocked_ps = min(product(num_waiting + 1, running_ps) // num_running, _MOST_TIME)
        token_time = min(product(token_ps + blocked_ps, slowdown), _MOST_TIME)
        self.token_times[row] = token_time
        self.slowdowns[row] = slowdown
        self.blocked_ps[row] = blocked_ps
        self.most_token_time = max(self.most_token_time, token_time)
        self.most_slowdown = max(self.most_slowdown, slowdown)

    # --- loads ------------------------------------------------------------------------------------------------------

    @property
    def least_load(self) -> int:
        """The load of the least loaded worker."""
        return int(self.loads[self.loads.argmin()])  # a quarter of what `min` takes

    def least_loaded(self) -> ReplicaCandidate:
        """Return the worker with the least load; ties: fewest KV tokens, then the first."""
        first = int(self.loads.argmin())
        if not self.loads.item(first):  # then none with this load has tokens
            return self.candidates[first]
        return self._fewest_tokens((self.loads == self.loads[first]).nonzero()[0])

    def least_loaded_among(self, rows: Rows, most: float) -> ReplicaCandidate | None:
        """Return the same of some rows, at least one; None: all have a load above `most`."""
        loads = self.loads[rows]
        first = int(loads.argmin())
        load = loads.item(first)
        if load > most:
            return None
        if not load:
            return self.candidates[rows.item(first)]
        return self._fewest_tokens(rows[loads == load])

    def _fewest_tokens(self, tied: Rows) -> ReplicaCandidate:
        """Return the worker with the fewest KV tokens of some rows; ties: the first."""
        if len(tied) == 1:
            return self.candidates[tied.item(0)]
        tokens = self.kv_tokens[tied]
        while True:
            place = int(tokens.argmin())
            row = tied.item(place)
            now = self.candidates[row].kv_tokens
            if now == tokens.item(place):
                return self.candidates[row]
            tokens[place] = now
            self.was_read(row)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def note_adapter(self, row: int, adapter_key: str, is_there: bool) -> None:
        """Record that an adapter has come to a worker's GPU or left it."""
        column = self._adapters.get(adapter_key)
        if column is None:
            column = self._adapters[adapter_key] = np.zeros(len(self.candidates), np.bool_)
        column[row] = is_there
        if not is_there and not column.any():
            del self._adapters[adapter_key]

    def with_adapter(self, adapter: Adapter) -> Rows | None:
        """Return the workers that have an adapter on the GPU; None: none has."""
        column = self._adapters.get(adapter.key)
        return None if column is None else column.nonzero()[0]

    # --- prefixes ---------------------------------------------------------------------------------------------------

    def note_chunking(self, row: int, is_chunking: bool) -> None:
        """Record whether a worker's plan goes on to compute a prompt, so that its cache may grow within the plan."""
        if is_chunking:
            self._chunking.add(row)
        else:
            self._chunking.discard(row)

    def holders(self, sequence: Sequence) -> Way | None:
        """Return which workers hold how much of a sequence's input; None: their caches are not of one kind.

        Upper bounds; exact for a worker that is up to date.
        """
        if sequence.skips_prefix_cache:
            return []
        if self._prefixes is None:
            self._prefixes = _tree(self.candidates)
        if self._prefixes is None:
            return None
        for row in sorted(self._chunking):
            self.candidates[row].bring_up_to_date()
        return self._prefixes.along(sequence)

    def rows(self, numbers: int) -> Rows:
        """Return the rows that are bits of a number, as `holders` gives them."""
        num = len(self.candidates)
        octets = np.frombuffer(numbers.to_bytes(num // 8 + 1, "little"), np.uint8)
        return np.unpackbits(octets, count=num, bitorder="little").nonzero()[0]


def _tree(candidates: Iterable[ReplicaCandidate]) -> PrefixHolders | None:
    """Return the tree of all prefix caches; None: they are not block caches of one kind."""
    caches: list[BlockCache] = []
    for candidate in candidates:
        cache = candidate.block_cache
        if cache is None:
            return None
        caches.append(cache)
    kind = (caches[0].block_size, caches[0].min_computed_tokens)
    if kind[1] < 1 or any((one.block_size, one.min_computed_tokens) != kind for one in caches):
        return None
    tree = PrefixHolders(*kind)
    for row, cache in enumerate(caches):
        cache.tell(tree, row)
    return tree
