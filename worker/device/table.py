"""Step time looked up in the user's own profile, and interpolated between its rows.

    decode(b, kv)       bilinear between the profiled batch sizes and context lengths
    prefill(n; c, p)    prefill(n, 0) + sum_i [prefill(c_i, p_i) - prefill(c_i, 0)], n = sum c_i; one chunk: its cell
    mixed               m * (prefill(n + b; c, p) + decode(b, kv) - decode(b, 0))
                        m: median of measured / estimated over the profile's mixed rows; 1 without any

Contexts count by their mean. Beyond the profiled range the last two cells are extrapolated, never downwards. The time
includes what the profile includes (CPU, head, all-reduce) and nothing else; adapters are added by the formula of
`lora`. A profile may be noisy, so a larger batch may take less time here; and no segment has a closed form.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import TypeVar

from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.batch import NO_LORA, Batch, LoraWork, Segment, StepCost
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.lora import LoraCost

_PS_PER_MS = 10**9

Points = Sequence[tuple[float, float]]
_T = TypeVar("_T")


class Grid:
    """A function of two arguments, given along lines of one x each.

    Args:
        cells: (x, y, value), in any order; several values of one cell are averaged. At least one.
    """

    def __init__(self, cells: Iterable[tuple[float, float, float]]) -> None:
        found: dict[float, dict[float, list[float]]] = {}
        for x, y, value in cells:
            found.setdefault(x, {}).setdefault(y, []).append(value)
        self._lines = [(x, sorted((y, fmean(v)) for y, v in line.items())) for x, line in sorted(found.items())]

    def __call__(self, x: float, y: float) -> float:
        """Return the interpolated value, never below 0."""
        lines = _around(self._lines, x)
        return max(0.0, interpolate([(at, interpolate(line, y)) for at, line in lines], x))


def interpolate(points: Points, at: float) -> float:
    """Return the value at `at`, interpolated between ascending points; ends are extrapolated, not downwards."""
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = _around(points, at)
    slope = (y1 - y0) / (x1 - x0)
    if at > points[-1][0] and slope < 0:
        return y1
    if at < points[0][0] and slope < 0:
        return y0
    return y0 + slope * (at - x0)


def _around(points: Sequence[tuple[float, _T]], at: float) -> Sequence[tuple[float, _T]]:
    """Return the two neighbours of `at`, or the last two beyond an end."""
    if len(points) < 2:
        return points
    index = bisect_right(points, at, key=lambda point: point[0])
    first = min(max(index - 1, 0), len(points) - 2)
    return points[first : first + 2]


class ProfileTable:
    """The rules above for one deployment's profile.

    Raises:
        CatalogueError: a profile without decodes or without prefills.
    """

    name = "table"
    reads_decode_lengths = False

    def __init__(self, deployment: Deployment) -> None:
        rows = [(row, row.step_ms) for row in deployment.profile if row.step_ms is not None]
        decodes = [(row.batch_size, row.kv_len, ms) for row, ms in rows if row.phase == "decode"]
        # The model has one prefill cell per row; several sequences at once are a sum.
        prefills = [
            (row.prefill_prefix, row.prefill_chunk, ms)
            for row, ms in rows
            if row.phase == "prefill" and row.batch_size == 1
        ]
        for what, cells in (("decode", decodes), ("prefill", prefills)):
            if not cells:
                raise CatalogueError(
                    f"the profile has no {what} rows for {deployment.model.name} on"
                    f" {deployment.tensor_parallel} x {deployment.gpu.name}"
                )
        self._decode, self._prefill = Grid(decodes), Grid(prefills)
        self._lora = LoraCost(
            deployment.gpu,
            deployment.model,
            deployment.tensor_parallel,
            deployment.lora,
            expert_parallel=deployment.expert_parallel,
        )
        self._mixed = 1.0
        ratios = [ms / self._batch_ms(row.batch()) for row, ms in rows if row.phase == "mixed" and row.batch_size > 1]
        if ratios:
            self._mixed = median(ratios)

    def step_ps(self, batch: Batch) -> int:
        """Return the step's duration; an empty batch takes the shortest step, a decode with nothing cached."""
        return round(self._batch_ms(batch) * _PS_PER_MS) + self._lora_ps(batch)

    def step_cost(self, batch: Batch) -> StepCost:
        """Return the step's duration: adapters, and the rest, which a profile does not divide."""
        lora_ps = self._lora_ps(batch)
        return StepCost(whole=self.step_ps(batch) - lora_ps, lora=lora_ps)

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
        """Return None: times are linear between two cells, but not across one."""
        del num_decodes, kv_tokens, max_kv_tokens, lora, num_held, longest_grows
        return None

    def _batch_ms(self, batch: Batch) -> float:
        if not batch.prefills:
            mean_kv = batch.decode_kv_tokens / batch.num_decodes if batch.num_decodes else 0
            return self._decode(max(batch.num_decodes, 1), mean_kv)
        num_tokens = batch.num_decodes + sum(chunk.new_tokens for chunk in batch.prefills)
        if len(batch.prefills) == 1 and not batch.num_decodes:
            (chunk,) = batch.prefills
            return self._prefill(chunk.past_tokens, chunk.new_tokens)
        ms = self._prefill(0, num_tokens)
        for chunk in batch.prefills:
            ms += self._prefill(chunk.past_tokens, chunk.new_tokens) - self._prefill(0, chunk.new_tokens)
        if not batch.num_decodes:
            return ms
        mean_kv = batch.decode_kv_tokens / batch.num_decodes
        return self._mixed * (ms + self._decode(batch.num_decodes, mean_kv) - self._decode(batch.num_decodes, 0))

    def _lora_ps(self, batch: Batch) -> int:
        return round(self._lora.step(batch.lora, bool(batch.prefills))[0] * PS_PER_SECOND)
