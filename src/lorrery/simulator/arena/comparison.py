"""What came of a comparison: the candidates' figures by seed, what they rank, and the files that say so.

Candidates of one seed had the same requests, so they are compared by the mean of their differences, seed by seed, with
its 95 % interval; where that has 0 in it, their order is not known.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from lorrery.service.errors import LorreryError
from lorrery.service.files.writing import write_whole
from lorrery.simulator.arena.candidates import Candidate
from lorrery.simulator.plan.level import Level
from lorrery.vocabulary.files import COMPARE_FILE, COMPARE_KIND, COMPARE_TABLE, FORMAT_VERSION
from lorrery.vocabulary.intervals import is_clear, mean_and_margin

__all__ = ["MEASURES", "TENANT", "Comparison", "Contestant", "Measure"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure by which candidates are compared; `arena.figures_of_round` computes it.

    Attributes:
        unit: after the number; `%` is of a share.
        ranks: whether the comparison says which candidate is the best by it.
    """

    name: str
    title: str
    unit: str
    less_is_better: bool = True
    ranks: bool = False

    def better(self, difference: float) -> bool:
        """Return whether a difference is to the better."""
        return difference < 0 if self.less_is_better else difference > 0


MEASURES = (
    Measure("goodput_ratio", "goodput", "%", less_is_better=False, ranks=True),
    Measure("worst_tenant_ratio", "worst tenant's goodput", "%", less_is_better=False),
    Measure("ttft_ms_mean", "TTFT mean", "ms"),
    Measure("ttft_ms_p99", "TTFT p99", "ms", ranks=True),
    Measure("tpot_ms_mean", "TPOT mean", "ms"),
    Measure("tpot_ms_p99", "TPOT p99", "ms", ranks=True),
    Measure("e2e_ms_mean", "E2E mean", "ms"),
    Measure("e2e_ms_p99", "E2E p99", "ms"),
    Measure("output_tokens_per_second", "output tokens/s", "", less_is_better=False, ranks=True),
    Measure("jain_index", "Jain's index", "", less_is_better=False, ranks=True),
    Measure("service_gap_tokens", "service gap", "tokens"),
    Measure("num_failed", "failed", ""),
    Measure("adapter_loads", "adapter loads", ""),
    Measure("eviction_regret_loads", "eviction regret", "loads"),
    Measure("placement_regret_loads", "placement regret", "loads"),
)
"""In the order of tables; those that no candidate has are left out of them."""
TENANT = "goodput_ratio:"
"""Prefix of a tenant's goodput."""


@dataclass(slots=True)
class Contestant:
    """A candidate and what it did.

    Attributes:
        candidate: its name and settings.
        parts: its policy, way to batch, limits, memory and placement by setting.
        rounds: figures by seed; NaN where there is nothing to compute one from.
        error: why there are none; empty if there are.
        warnings: that its figures must be read with.
    """

    candidate: Candidate
    parts: Mapping[str, str] = field(default_factory=dict)
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    error: str = ""
    warnings: dict[str, None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As the caller gave it."""
        return self.candidate.name

    def values(self, figure: str) -> list[float]:
        """Return a figure of each seed, in order."""
        return [figures.get(figure, math.nan) for _, figures in sorted(self.rounds.items())]

    def mean(self, figure: str) -> tuple[float, float]:
        """Return a figure's mean over the seeds, and half of its 95 % interval; infinite for one seed."""
        return mean_and_margin(self.values(figure))


@dataclass(slots=True)
class Comparison:
    """Candidates on the same requests.

    Attributes:
        level: that requests are held against.
        seeds: of the runs.
        contestants: in the order asked for; differences are to the first that ran.
        equal: which candidates made the same decisions, and why.
        notes: what the figures must be read with.
        about: what all had, for a reader: model, workload and so on.
    """

    level: Level
    seeds: Sequence[int]
    contestants: list[Contestant]
    equal: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def ran(self) -> list[Contestant]:
        """Those with figures."""
        return [one for one in self.contestants if not one.error]

    @property
    def tenants(self) -> list[str]:
        """Tenants, those with most requests first."""
        names = (name for one in self.ran[:1] for figures in one.rounds.values() for name in figures)
        return [name.removeprefix(TENANT) for name in dict.fromkeys(names) if name.startswith(TENANT)]

    def differences(self, base: Contestant, other: Contestant, figure: str) -> list[float]:
        """Return `other - base` of each seed; NaN where one has no such figure."""
        return [b - a for a, b in zip(base.values(figure), other.values(figure), strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it, for `DIR/compare.json`."""
        contestants = [
            {
                "name": one.name,
                "overrides": one.candidate.overrides,
                "parts": one.parts,
                "error": one.error,
                "rounds": {str(seed): _finite(figures) for seed, figures in one.rounds.items()},
            }
            for one in self.contestants
        ]
        return {
            "kind": COMPARE_KIND,
            "format_version": FORMAT_VERSION,
            "level": str(self.level),
            "seeds": list(self.seeds),
            "about": self.about,
            "measures": [asdict(measure) for measure in self.measures],
            "tenants": self.tenants,
            "contestants": contestants,
            "verdicts": self.verdicts,
            "equal": self.equal,
            "notes": self.notes,
        }

    @property
    def measures(self) -> list[Measure]:
        """Those that some candidate has, failures only if there were some."""
        return [
            measure
            for measure in MEASURES
            if any(math.isfinite(value) for one in self.ran for value in one.values(measure.name))
            and (measure.name != "num_failed" or any(any(one.values("num_failed")) for one in self.ran))
        ]

    @property
    def verdicts(self) -> list[str]:
        """For each ranking figure the best candidate, and those that are not separable from it."""
        return list(self._verdicts())

    def _verdicts(self) -> Iterator[str]:
        ran = self.ran
        if len(ran) < 2:
            return
        for measure in self.measures:
            known = [one for one in ran if math.isfinite(one.mean(measure.name)[0])]
            if not measure.ranks or len(known) < 2:
                continue
            sign = 1 if measure.less_is_better else -1
            best = min(known, key=lambda one: sign * one.mean(measure.name)[0])
            others = [one for one in known if one is not best]
            apart = {one.name: self.differences(best, one, measure.name) for one in others}
            equal = [name for name, differences in apart.items() if not any(differences)]
            unclear = [name for name, differences in apart.items() if name not in equal and not is_clear(differences)]
            if len(equal) == len(others):
                yield f"{measure.title}: all are equal"
                continue
            text = f"{measure.title}: {best.name} is the best"
            if equal:
                text += f", with {', '.join(equal)} equal to it"
            if unclear:
                text += f"; not separable from it: {', '.join(unclear)}"
            yield text + ("" if len(self.seeds) > 1 else " (one seed: of these requests)")


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def write(found: Comparison, folder: Path) -> list[Path]:
    """Write all of it as JSON, and the figures as CSV with a row for each run; return the files.

    Raises:
        LorreryError: they cannot be written.
    """
    names = list(dict.fromkeys(name for one in found.ran for figures in one.rounds.values() for name in figures))
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["candidate", "seed", *names])
    for one in found.ran:
        for seed, figures in sorted(one.rounds.items()):
            shown = _finite(figures)
            writer.writerow([one.name, seed, *(shown.get(name) for name in names)])
    content = {COMPARE_FILE: json.dumps(found.to_json(), indent=1) + "\n", COMPARE_TABLE: text.getvalue()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, one_text in content.items():
            write_whole(folder / name, one_text.encode())
    except OSError as error:
        raise LorreryError(f"{folder}: {error.strerror}") from None
    return [folder / name for name in content]
