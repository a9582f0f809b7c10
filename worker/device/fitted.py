"""Step time fitted to a log of engine steps.

    decode step    = d(b) + c_kv * KV tokens                         b sequences
    prefill step   = p(n) + c_pair * pairs (+ c_kv * KV tokens)      n tokens: prompt tokens, and decodes beside them

d and p are linear between knots, which stand where the log has rows: every count with enough of them, as long as there
are no more than `MOST_KNOTS`. Outside they continue with the slope of the one line that fits all rows best. The values
at the knots and the c are found by least squares on relative errors, decodes first. pairs is the sum of m * (q + m / 2)
over the prompts, m new tokens after q cached ones, as in the log (`steps`). A coefficient that would be negative is 0.

So decode steps have a closed form, and a count at which the engine is slow (odd ones, padded ones) is slow here. The
time includes what the log includes (CPU, head, all-reduce) and nothing else; adapters are added by the formula of
`lora`. A log may be noisy, so a larger batch may take less time here.

A log needs as many rows of each kind as there are constants to find. Steps outside the range of its rows are
extrapolated; the model records which were (`beyond`).
"""

from bisect import bisect_right
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lorrery.vocabulary.units import picoseconds
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, Segment, StepCost
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.lora import LoraCost
from lorrery.worker.device.steps import MOST_COUNTED


class Extent:
    """The range of one quantity.

    Args:
        what: its name, in the plural.
        low: the least of the rows.
        high: the largest of the rows.
    """

    __slots__ = ("_high", "_least", "_low", "_most", "_what")

    def __init__(self, what: str, low: int, high: int) -> None:
        self._what, self._low, self._high = what, low, high
        self._least, self._most = low, high

    def see(self, value: int) -> None:
        """Record a queried value."""
        if value > self._most:
            self._most = value
        elif value < self._least:
            self._least = value

    def forget(self) -> None:
        """Reset the record of queries."""
        self._least, self._most = self._low, self._high

    @property
    def beyond(self) -> str:
        """Queries outside the rows, in words; empty if there were none."""
        found = [f"down to {self._least:,}"] if self._least < self._low else []
        if self._most > self._high:
            found.append(f"up to {self._most:,}")
        measured = f"{self._low:,}" if self._low == self._high else f"{self._low:,} to {self._high:,}"
        return f"{' and '.join(found)} {self._what} (measured: {measured})" if found else ""


def beyond(extents: Iterable[Extent]) -> str:
    """Describe the queries outside the rows of several extents; empty if there were none."""
    found = [extent.beyond for extent in extents]
    return ", ".join(text for text in found if text)


MOST_KNOTS = 256
LEAST_ROWS = 5
"""Rows of the log per knot; more where there would be more than `MOST_KNOTS`."""

_ROWS_AT_ONCE = 65_536

Floats = NDArray[np.float64]


class Curve:
    """time = base(count) + slope * work, fitted.

    Args:
        counts: of each row, not negative.
        work: of each row.
        seconds: of each row, more than 0.

    Attributes:
        work_seconds: the slope, at least 0.
        error: mean relative error of the rows.
        counts: the least and the largest of the rows.
        told: whether the rows separate the cost of counts from the cost of work.

    Raises:
        ValueError: fewer rows than constants; the message has both numbers.
    """

    def __init__(self, counts: Floats, work: Floats, seconds: Floats) -> None:
        knots = _knots(counts)
        figures = len(knots) + bool(work.max())
        if len(counts) < figures:
            raise ValueError(f"{len(counts)} row{'' if len(counts) == 1 else 's'} for {figures} figures")
        self._beyond = 0.0
        if len(knots) > 1:
            ends = knots[[0, -1]]
            (low, high), _, _ = _fit(ends, counts, work, seconds)
            self._beyond = max(0.0, float((high - low) / (ends[1] - ends[0])))
        bases, self.work_seconds, self.told = _fit(knots, counts, work, seconds)
        modelled = np.maximum(0.0, np.interp(counts, knots, bases)) + self.work_seconds * work
        self.error = float(np.abs(modelled / seconds - 1.0).mean())
        self.counts = int(knots[0]), int(knots[-1])
        self._knots: list[float] = knots.tolist()
        self._bases: list[float] = bases.tolist()

    def base_seconds(self, count: int) -> float:
        """Return the base, never below 0."""
        knots, bases = self._knots, self._bases
        inside = min(max(float(count), knots[0]), knots[-1])
        # Same as np.interp, which takes several times as long for one number.
        at = bisect_right(knots, inside) - 1
        base = bases[at]
        if inside > knots[at]:
            base += (bases[at + 1] - base) / (knots[at + 1] - knots[at]) * (inside - knots[at])
        return max(0.0, base + self._beyond * (count - inside))


def _account(curve: Curve, num_rows: int, what: str, of: str) -> str:
    low, high = curve.counts
    sizes = f"{low:,} to {high:,} {of}s" if low < high else f"{low:,} {of}{'' if low == 1 else 's'}"
    apart = "" if curve.told else ", which do not tell what more of them and what longer ones cost"
    return f"{num_rows:,} step{'' if num_rows == 1 else 's'} {what}of {sizes}, {curve.error:.1%} off{apart}"


def _knots(counts: Floats) -> Floats:
    """Return the counts that have a value of their own, the least and the largest among them."""
    values, num_rows = np.unique(counts, return_counts=True)
    enough = max(LEAST_ROWS, len(counts) / MOST_KNOTS)
    chosen, rows = [values[0]], 0
    for value, num in zip(values[1:].tolist(), num_rows[1:].tolist(), strict=True):
        rows += num
        if rows >= enough:
            chosen.append(value)
            rows = 0
    if chosen[-1] != values[-1]:
        chosen.append(values[-1])
    return np.array(chosen, np.float64)


def _fit(knots: Floats, counts: Floats, work: Floats, seconds: Floats) -> tuple[Floats, float, bool]:
    """Return the bases at the knots, and the slope over the work: least squares on relative errors.

    The last value is whether the rows determine all of them.
    """
    largest = float(work.max())
    size = len(knots) + bool(largest)
    squares, sums = np.zeros((size, size)), np.zeros(size)
    for start in range(0, len(counts), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        matrix = _hats(knots, counts[rows])
        if largest:
            matrix = np.column_stack((matrix, work[rows] / largest))
        matrix /= seconds[rows, np.newaxis]
        squares += matrix.T @ matrix
        sums += matrix.sum(axis=0)
    # Where the rows do not determine the knots, take the smallest values that fit.
    solution = np.linalg.lstsq(squares, sums, rcond=None)
    found, told = solution[0].astype(np.float64), int(solution[2]) == size
    if not largest:
        return found, 0.0, told
    if found[-1] < 0:
        return _fit(knots, counts, np.zeros_like(work), seconds)
    return found[:-1], float(found[-1]) / largest, told


def _hats(knots: Floats, counts: Floats) -> Floats:
    """Return each row's weights on the knots beside it; shape (rows, knots)."""
    shares = np.zeros((len(counts), len(knots)))
    if len(knots) == 1:
        shares[:] = 1.0
        return shares
    left = np.clip(np.searchsorted(knots, counts, side="right") - 1, 0, len(knots) - 2)
    share = (counts - knots[left]) / (knots[left + 1] - knots[left])
    rows = np.arange(len(counts))
    shares[rows, left] = 1.0 - share
    shares[rows, left + 1] = share
    return shares


def _curve(what: str, counts: Floats, work: Floats, seconds: Floats) -> Curve:
    try:
        return Curve(counts, work, seconds)
    except ValueError as error:
        raise CatalogueError(
            f"the log of engine steps has too few {what}: {error} (times of the least and the largest size, and one per"
            " token of context); log more, or leave out decode_kv_tokens and prefill_attn_pairs"
        ) from None


class Fitted:
    """The rules above for one deployment's log.

    Attributes:
        account: the range and error of the fit, in words.

    Raises:
        CatalogueError: a log without steps of decodes alone, or without prefills, or with too few of them.
    """

    name = "fitted"
    reads_decode_lengths = False

    def __init__(self, deployment: Deployment) -> None:
        log = np.array(
            [
                (s.seconds, s.prefill_tokens, s.num_decodes, s.decode_kv_tokens, s.prefill_pairs)
                for s in deployment.steps
            ],
            np.float64,
        ).reshape(-1, 5)
        prefills, decodes = log[log[:, 1] > 0], log[log[:, 1] == 0]
        for what, rows in (("steps of decodes alone", decodes), ("steps with prefill", prefills)):
            if not len(rows):
                raise CatalogueError(f"the log of engine steps has no {what}")
        self._decode = _curve("steps of decodes alone", decodes[:, 2], decodes[:, 3], decodes[:, 0])
        # Time of decodes beside the prompts, at most half of the row's.
        beside = np.minimum(prefills[:, 3] * self._decode.work_seconds, prefills[:, 0] / 2)
        tokens = prefills[:, 1] + prefills[:, 2]
        self._prefill = _curve("steps with prefill", tokens, prefills[:, 4], prefills[:, 0] - beside)
        self.account = (
            f"{_account(self._decode, len(decodes), '', 'decode')};"
            f" {_account(self._prefill, len(prefills), 'with prefill, ', 'token')}; beyond that extrapolated"
        )
        self._seen_decodes = Extent("decodes in a step", *self._decode.counts)
        self._seen_tokens = Extent("tokens in a step with prefill", *self._prefill.counts)
        # Not for a log without KV tokens: then no time depends on them.
        self._seen_kv = Extent("KV tokens in a step", 0, int(log[:, 3].max()) if decodes[:, 3].any() else MOST_COUNTED)
        self._kv_token_ps = picoseconds(self._decode.work_seconds)
        self._half_pair_ps = picoseconds(self._prefill.work_seconds / 2)
        self._lora = LoraCost(
            deployment.gpu,
            deployment.model,
            deployment.tensor_parallel,
            deployment.lora,
            expert_parallel=deployment.expert_parallel,
        )
        self._decode_ps = cache(lambda count: picoseconds(self._decode.base_seconds(count)))
        self._prefill_ps = cache(lambda count: picoseconds(self._prefill.base_seconds(count)))

    @property
    def beyond(self) -> str:
        """Queries outside the range of its rows, in words; empty if there were none."""
        return beyond((self._seen_decodes, self._seen_kv, self._seen_tokens))

    def saw_kv_tokens(self, kv_tokens: int) -> None:
        """Record the KV tokens of the last of the decode steps that ran; a segment is queried at its first only."""
        self._seen_kv.see(kv_tokens)

    def forget(self) -> None:
        """Reset the record of queries."""
        for extent in (self._seen_decodes, self._seen_kv, self._seen_tokens):
            extent.forget()

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration; 0 if the batch is empty."""
        if not batch.prefills and not batch.num_decodes:
            return 0
        batch_ps = self._batch_ps(batch)
        return batch_ps + self._lora_ps(batch.lora, bool(batch.prefills)) if batch.lora.num_adapters else batch_ps

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration: adapters, and the rest, which a log does not divide."""
        whole_ps = self.step_ps(batch)
        lora_ps = self._lora_ps(batch.lora, bool(batch.prefills)) if whole_ps else 0
        return StepCost(whole=whole_ps - lora_ps, lora=lora_ps)

    def decode_segment(
        self,
        num_decodes: int,
        kv_tokens: int,
        max_kv_tokens: int,
        lora: LoraWork = NO_LORA,
        *,
        num_held: int = 0,
        longest_grows: bool = True,
    ) -> Segment | None:
        """Return the times of consecutive decode steps: always a straight line."""
        del max_kv_tokens, longest_grows
        self._seen_decodes.see(num_decodes)
        self._seen_kv.see(kv_tokens)
        base_ps = self._decode_ps(num_decodes) + kv_tokens * self._kv_token_ps
        if lora.num_adapters:
            base_ps += self._lora_ps(lora, False)
        return Segment(base_ps, (num_decodes - num_held) * self._kv_token_ps)

    def _lora_ps(self, lora: LoraWork, prefills: bool) -> int:
        return picoseconds(self._lora.step(lora, prefills)[0])

    def _batch_ps(self, batch: Batch) -> int:
        kv_ps = batch.decode_kv_tokens * self._kv_token_ps
        self._seen_kv.see(batch.decode_kv_tokens)
        if not batch.prefills:
            self._seen_decodes.see(batch.num_decodes)
            return self._decode_ps(batch.num_decodes) + kv_ps
        num_tokens = batch.num_decodes + sum([chunk.new_tokens for chunk in batch.prefills])
        self._seen_tokens.see(num_tokens)
        half_pairs = sum([chunk.new_tokens * (2 * chunk.past_tokens + chunk.new_tokens) for chunk in batch.prefills])
        return self._prefill_ps(num_tokens) + half_pairs * self._half_pair_ps + kv_ps
