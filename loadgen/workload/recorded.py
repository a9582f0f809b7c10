"""Collects a trace's rows into columns: times from the first one on, blocks of prompts, sessions.

Sizes of blocks. A prompt of n tokens in k blocks of B tokens has k = ceil(n / B), so ceil(n / k) <= B < n / (k - 1).
What all rows allow usually leaves one power of two; 512, Mooncake's own, is preferred.

Bursts. Traces have times in steps: of 3 s in Mooncake's conversations, of 1 s in BurstGPT. Requests that share one
arrived somewhere in that step, in the file's order; replayed unchanged they come at once. `spread` moves them apart.
"""

from array import array
from collections.abc import Hashable
from typing import Final

import numpy as np
import numpy.typing as npt

from lorrery.loadgen.workload.columns import Blocks, Chains, MemorySpool, Spool, WorkloadColumns
from lorrery.loadgen.workload.request import BLOCK_TOKENS, MOST_TOKENS, TraceError

MOST_ROWS: Final = 10_000_000
"""In one workload; 48 bytes each, up to 40 more for blocks and sessions, and a third of that while they are sorted."""
_UNKNOWN: Final = -1
_SHARED_STEP: Final = 0.5
"""Least share of requests that have their time in common with others, for times that step."""


class RecordedRows:
    """Takes the rows of a trace in any order of time.

    Args:
        per_second: of the stamps' unit.
        block_tokens: of a prompt's blocks; None: what the rows say.
        most: rows to take; None: all, at most `MOST_ROWS`.
        usual_block_tokens: the size of blocks that is meant where the rows allow several.
        spool: keeps their block ids; None: in memory.

    Attributes:
        num_failed: rows left out, of requests that failed when they were recorded.
        remarks: on how rows were read, for the reader of the report.
    """

    def __init__(
        self,
        per_second: float,
        block_tokens: int | None = None,
        most: int | None = None,
        usual_block_tokens: int = BLOCK_TOKENS,
        spool: Spool | None = None,
    ) -> None:
        self._per_second, self._most = per_second, most
        self._block_tokens, self._usual = block_tokens, usual_block_tokens
        self._least_block, self._most_block = 1, MOST_TOKENS
        self._stamps, self._prompts, self._outputs = array("d"), array("i"), array("i")
        # What most traces lack; filled up to the first row that has it.
        self._priorities = array("i")
        self._spool = MemorySpool() if spool is None else spool
        self._places, self._counts = array("q"), array("i")
        self._firsts, self._numbers, self._thinks = array("i"), array("i"), array("d")
        self._last_of: dict[Hashable, int] = {}
        self.num_failed = 0
        self.remarks: list[str] = []

    def __len__(self) -> int:
        return len(self._stamps)

    @property
    def is_full(self) -> bool:
        """Whether it has all rows that were asked for."""
        return self._most is not None and len(self) >= self._most

    @property
    def has_blocks(self) -> bool:
        """Whether a row has ids of blocks."""
        return bool(self._places)

    @property
    def num_following(self) -> int:
        """Rows that are sent after the answer to another one."""
        return len(self._numbers) - self._numbers.count(0)

    def knows(self, session: Hashable) -> bool:
        """Return whether there is a row of this session."""
        return session in self._last_of

    def add(
        self,
        where: str,
        stamp: float,
        prompt_tokens: int,
        output_tokens: int,
        *,
        block_ids: "array[int] | None" = None,
        priority: int = 0,
        session: Hashable = None,
        think_seconds: float | None = None,
    ) -> None:
        """Add a row. A length of 0 counts as one token, because empty requests do not exist here.

        Args:
            where: the row's place in the file, for errors.
            stamp: its time in the trace's unit.
            prompt_tokens: at most `MOST_TOKENS`, as the next.
            output_tokens: of its answer.
            block_ids: of its prompt; None or empty: not known.
            priority: 32 bits, signed.
            session: later rows may follow this one by it; None: none does.
            think_seconds: sent so long after the answer to the session's row before; None: at its time.

        Raises:
            TraceError: a length that no request has, or ids that do not fit the prompt.
        """
        if max(prompt_tokens, output_tokens) > MOST_TOKENS:
            raise TraceError(
                f"{where}: a prompt or an answer has at most {MOST_TOKENS} tokens, found {prompt_tokens} and"
                f" {output_tokens}"
            )
        row = len(self._stamps)
        if row == MOST_ROWS:
            raise TraceError(f"more than {MOST_ROWS:,} rows, the most that one run plays; -n N takes the first N")
        self._stamps.append(stamp)
        self._prompts.append(prompt_tokens := prompt_tokens or 1)
        self._outputs.append(output_tokens or 1)
        if priority:
            _fill(self._priorities, row, 0)
            self._priorities.append(priority)
        if block_ids:
            self._fit(where, prompt_tokens, len(block_ids))
            _fill(self._places, row, 0)
            _fill(self._counts, row, _UNKNOWN)
            self._places.append(self._spool.add(block_ids.tobytes()))
            self._counts.append(len(block_ids))
        if think_seconds is not None:
            self._follow(where, row, session, think_seconds)
        if session is not None:
            self._last_of[session] = row

    def remark(self, text: str) -> None:
        """Add a remark, once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def _follow(self, where: str, row: int, session: Hashable, think_seconds: float) -> None:
        before = self._last_of.get(session)
        if session is None or before is None:
            raise TraceError(f"{where}: its delay counts from the row before of its session, and there is none")
        self._firsts.extend(range(len(self._firsts), row))
        _fill(self._numbers, row, 0)
        _fill(self._thinks, row, 0.0)
        self._firsts.append(self._firsts[before])
        self._numbers.append(self._numbers[before] + 1)
        self._thinks.append(think_seconds)

    def _fit(self, where: str, prompt_tokens: int, num_blocks: int) -> None:
        least = -(-prompt_tokens // num_blocks)
        most = MOST_TOKENS if num_blocks == 1 else -(-prompt_tokens // (num_blocks - 1)) - 1
        if (size := self._block_tokens) is not None:
            if not least <= size <= most:
                raise TraceError(
                    f"{where}: {num_blocks} hash_ids for {prompt_tokens} tokens; with --block-tokens {size} expected"
                    f" {-(-prompt_tokens // size)}"
                )
            return
        self._least_block, self._most_block = max(self._least_block, least), min(self._most_block, most)
        if self._least_block > self._most_block:
            raise TraceError(
                f"{where}: {num_blocks} hash_ids for {prompt_tokens} tokens; no size of blocks fits this row and those"
                " before it"
            )

    def block_tokens(self) -> int:
        """Return the tokens of a block.

        Raises:
            TraceError: the rows do not say.
        """
        if self._block_tokens is not None:
            return self._block_tokens
        least, most = self._least_block, self._most_block
        if not self.has_blocks or least <= self._usual <= most:
            return self._usual
        fitting = [1 << power for power in range(31) if least <= 1 << power <= most]
        if len(fitting) != 1:
            size = f"{least} tokens" if least == most else f"{least} to {most} tokens"
            raise TraceError(f"hash_ids fit blocks of {size}; say which: --block-tokens N")
        return fitting[0]

    def columns(self) -> WorkloadColumns:
        """Return the requests in order of time, the first at 0; rows of one stamp stay in the file's order.

        Raises:
            TraceError: as `block_tokens`.
        """
        num_rows = len(self)
        stamps = began = np.frombuffer(self._stamps)
        blocks = chains = None
        if self._places:
            _fill(self._places, num_rows, 0)
            _fill(self._counts, num_rows, _UNKNOWN)
            places, counts = np.frombuffer(self._places, np.int64), np.frombuffer(self._counts, np.int32)
            blocks = Blocks(self._spool, places, counts, self.block_tokens())
        if self._numbers:
            self._firsts.extend(range(len(self._firsts), num_rows))
            _fill(self._numbers, num_rows, 0)
            _fill(self._thinks, num_rows, 0.0)
            first, numbers = np.frombuffer(self._firsts, np.int32), np.frombuffer(self._numbers, np.int32)
            session = np.where(np.bincount(first, minlength=num_rows)[first] > 1, first, _UNKNOWN).astype(np.int32)
            chains = Chains(session, numbers, np.frombuffer(self._thinks))
            began = stamps[first]
        if self._priorities:
            _fill(self._priorities, num_rows, 0)
        rows = WorkloadColumns(
            np.arange(num_rows, dtype=np.int32),
            (began - began.min(initial=np.inf)) / self._per_second,
            np.array(self._prompts, np.int64),
            np.array(self._outputs, np.int64),
            blocks=blocks,
            priority=np.frombuffer(self._priorities, np.int32) if self._priorities else None,
            chains=chains,
        )
        if chains is not None:
            return rows.placed(rows.at_seconds, np.lexsort((chains.number, first, began)))
        if not (began[1:] < began[:-1]).any():
            return rows
        return rows.placed(rows.at_seconds, np.argsort(began, kind="stable"))


def _fill(column: "array[int] | array[float]", num_rows: int, value: float) -> None:
    column.extend([value] * (num_rows - len(column)))  # type: ignore[list-item]  # of the column's own type


def _begins(workload: WorkloadColumns) -> npt.NDArray[np.bool_]:
    """Return which requests have a time of their own: all but the later turns of sessions; shape (n,)."""
    if workload.chains is None:
        return np.ones(len(workload), np.bool_)
    begins: npt.NDArray[np.bool_] = workload.chains.number == 0
    return begins


def step_seconds(workload: WorkloadColumns) -> tuple[float, int] | None:
    """Return the usual step of times, and how many requests share theirs with others; None: fewer than half do."""
    at_seconds = workload.at_seconds[_begins(workload)]
    distinct, counts = np.unique(at_seconds, return_counts=True)
    num_sharing = int(counts[counts > 1].sum())
    if len(distinct) < 2 or num_sharing < _SHARED_STEP * len(at_seconds):
        return None
    return float(np.median(np.diff(distinct))), num_sharing


def spread(workload: WorkloadColumns, rng: np.random.Generator, window_seconds: float) -> WorkloadColumns:
    """Place requests that share a time at random within the window that follows it, in their order.

    Args:
        workload: in order of time.
        rng: one uniform draw per request that has a time of its own.
        window_seconds: length of the window, in the workload's own seconds.
    """
    begins = _begins(workload)
    at_seconds = workload.at_seconds[begins]
    group = np.concatenate(([0], np.cumsum(np.diff(at_seconds) > 0))) if len(at_seconds) else np.empty(0, np.int64)
    offsets = rng.uniform(0.0, window_seconds, len(at_seconds))
    placed = (at_seconds + offsets[np.lexsort((offsets, group))])[np.cumsum(begins) - 1]
    return workload.placed(placed, np.argsort(placed, kind="stable"))
