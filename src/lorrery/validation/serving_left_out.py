"""Predicts each group of served runs without the constants that were found on it.

Kernels are timed one by one, independent of served runs. Found on served runs are an engine's few constants
(`engines.toml`): the host's times, and factors on kernels. Here they are found again without a group's rows, on those
of the engine's other groups, from neutral values: by two Gauss-Newton steps on the relative errors of TPOT and, with
less weight, TTFT. Constants that those rows do not determine (a factor on 8-bit caches, where they have none) stay
neutral. An engine measured on one group only gets the constants of the same engine on other GPUs; if there are none,
nothing can be left out. `prompt_token_ms`, the clients' own constant, stays unchanged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from lorrery.validation.figures import percent
from lorrery.validation.serving import Members, ServingComparison, ServingGroup, Watch, grouped, predict_all
from lorrery.validation.serving_rows import OK, ServingRow
from lorrery.validation.serving_run import Options, Prediction, Tables, settings_of, write_changed
from lorrery.view.terminal import FigureTable
from lorrery.worker.device.catalogue.tables import Catalogue
from lorrery.worker.device.deployment import Engine

Constants = Mapping[str, float]
Run = tuple[ServingRow, Options]

_NOTHING: Constants = {
    "step_ms": 1.0, "sequence_ms": 0.02, "prefill_ms": 0.0, "gemm_factor": 1.0, "prefill_factor": 1.0,
    "decode_factor": 1.0, "fp8_decode_factor": 1.0, "all_reduce_factor": 1.0,
}  # fmt: skip
"""Constants that may be found again -> neutral values."""
_SCALE: Constants = {"step_ms": 1.0, "sequence_ms": 0.02, "prefill_ms": 10.0}
"""Step of a constant for a slope, and unit of its prior; 0.3 for factors."""
_FACTOR_SCALE, _LEAST_FACTOR, _MOST_FACTOR = 0.3, 0.4, 1.6
_MOST_ROWS = 12
"""To fit constants on."""
_ROUNDS = 2
_TTFT_WEIGHT, _DOUBT = 0.3, 0.05
_MOST_ERROR = 0.5
"""Larger errors of a row count as this much."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A group without the constants found on it.

    Attributes:
        before: its errors with the shipped constants.
        after: with the others; None: nothing could be left out.
        how: source of the others, or why there are none.
        constants: that were found again.
    """

    before: ServingGroup
    after: ServingGroup | None
    how: str
    constants: Constants


@dataclass(slots=True)
class _Case:
    """A group that is left out.

    Attributes:
        members: its rows.
        engine: the catalogue entry that they run under.
        base: the same engine without measurements on the GPU.
        donors: rows of other groups under that entry.
        others: names of those groups.
        constants: so far.
    """

    members: Members
    engine: Engine
    base: Engine
    donors: Sequence[ServingRow]
    others: Sequence[str]
    constants: dict[str, float]

    @property
    def why_not(self) -> str:
        """Why nothing can be left out; empty: something can."""
        if self.donors:
            return "" if self.constants else "no constants"
        return "no other rows" if self.base.name == self.engine.name else ""


def leave_out(
    comparison: ServingComparison,
    group_by: Sequence[str],
    options: Options,
    catalogue: Catalogue,
    *,
    jobs: int,
    watch: Watch = lambda found, total: found,
) -> list[LeftOut]:
    """Predict each group of a comparison, of quality ok, without the engine's constants that were found on it."""
    before = comparison.predictions
    cases = list(_cases(comparison, group_by, options, catalogue))
    possible = [case for case in cases if not case.why_not]
    with TemporaryDirectory() as folder:
        files = _Files(Path(folder), options)
        for _ in range(_ROUNDS):
            _improve([case for case in possible if case.donors], files, jobs, watch)
        chosen = [files.options(case, case.constants) for case in possible]
        runs = [
            (comparison.file.rows[index], own) for case, own in zip(possible, chosen, strict=True)
            for index in case.members.indices
        ]  # fmt: skip
        predicted = iter(predict_all(runs, jobs=jobs, watch=watch))
    found: list[LeftOut] = []
    for case in cases:
        if case.why_not:
            found.append(LeftOut(case.members.errors(before), None, case.why_not, {}))
            continue
        after = {index: next(predicted) for index in case.members.indices}
        both = replace(case.members, indices=[index for index, one in after.items() if not one.why])
        found.append(LeftOut(both.errors(before), both.errors(after), _how(case), case.constants))
    return found


def render(found: Sequence[LeftOut]) -> FigureTable:
    """Return them as a table."""
    keys = list(dict.fromkeys(name for one in found for name in one.before.key))
    table = FigureTable(first_to_go=("TTFT rows",))
    for name in keys:
        table.add_column(name, justify="left", wraps_at=9)
    for name in ("rows", "TPOT MAPE %", "left out", "TTFT MAPE %", "left out "):
        table.add_column(name)
    table.add_column("constants then", justify="left", wraps_at=30)
    for one in found:
        tpot, ttft = _mapes(one.after)
        table.add_row(
            *(one.before.key.get(name, "") for name in keys), f"{one.before.num_rows:,}",
            percent(one.before.tpot.mape), percent(tpot), percent(one.before.ttft.mape), percent(ttft), one.how,
        )  # fmt: skip
    return table


def to_json(found: Sequence[LeftOut]) -> list[dict[str, object]]:
    """Return them for JSON."""
    return [
        {
            "group": dict(one.before.key),
            "rows": one.before.num_rows,
            "tpot_mape": one.before.tpot.mape,
            "tpot_mape_left_out": _mapes(one.after)[0],
            "ttft_rows": one.before.ttft.num_rows,
            "ttft_mape": one.before.ttft.mape,
            "ttft_mape_left_out": _mapes(one.after)[1],
            "constants_from": one.how,
            "constants": dict(one.constants),
        }
        for one in found
    ]


def _mapes(group: ServingGroup | None) -> tuple[float | None, float | None]:
    return (None, None) if group is None else (group.tpot.mape, group.ttft.mape)


def _cases(
    comparison: ServingComparison, group_by: Sequence[str], options: Options, catalogue: Catalogue
) -> Iterator[_Case]:
    file = comparison.file
    predicted = [index for index, one in enumerate(comparison.predictions) if not one.why]
    groups = [one for one in grouped(file, predicted, group_by) if one.quality == OK]
    engines = [_engines_of(file.rows[one.indices[0]], options, catalogue) for one in groups]
    for members, (engine, base) in zip(groups, engines, strict=True):
        others = [
            one for one, (its, _) in zip(groups, engines, strict=True) if its.name == engine.name and one is not members
        ]
        rows = [file.rows[index] for one in others for index in one.indices]
        donors = rows[:: -(-len(rows) // _MOST_ROWS)] if rows else []
        names = [" ".join(one.key.values()) for one in others]
        start = {name: value for name, value in _NOTHING.items() if getattr(engine, name) != _unset(name)}
        yield _Case(members, engine, base, donors, names, start if donors else {})


def _unset(name: str) -> float:
    return 1.0 if name.endswith("factor") else 0.0


def _engines_of(row: ServingRow, options: Options, catalogue: Catalogue) -> tuple[Engine, Engine]:
    """Return the engine as on the row's GPU, and as without any measurement."""
    worker = settings_of(row, options).worker
    engine = catalogue.engine(worker.engine, catalogue.gpu(worker.gpu))
    return engine, catalogue.engines.get(worker.engine, engine)


def _how(case: _Case) -> str:
    if not case.donors:
        return f"of {case.base.name} on other GPUs"
    values = ", ".join(f"{name} {value:.3g}" for name, value in case.constants.items())
    return f"{values}; {len(case.donors)} rows of {', '.join(case.others)}"


class _Files:
    """Catalogue files with other constants."""

    def __init__(self, folder: Path, options: Options) -> None:
        self._folder, self._options, self._number = folder, options, 0

    def options(self, case: _Case, constants: Constants) -> Options:
        """Return options under which the case's engine has these constants, or, without donors, those of its base."""

        def change(tables: Tables) -> None:
            engines = tables["engines"]
            if case.donors:
                engines[case.engine.name] |= constants
            else:
                engines[case.engine.name] = dict(engines[case.base.name])

        self._number += 1
        path = self._folder / f"{self._number}.toml"
        return replace(self._options, catalogue=write_changed(path, self._options.catalogue, change))


def _improve(cases: Sequence[_Case], files: _Files, jobs: int, watch: Watch) -> None:
    """Do one Gauss-Newton step in each case, all simulated together."""
    runs: list[Run] = []
    for case in cases:
        moved_one = ({**case.constants, name: value + _scale(name) / 2} for name, value in case.constants.items())
        for constants in (case.constants, *moved_one):
            options = files.options(case, constants)
            runs += [(row, options) for row in case.donors]
    found = predict_all(runs, jobs=jobs, watch=watch)
    for case in cases:
        names, number = list(case.constants), len(case.donors)
        errors = [_errors(case.donors, found[at * number : (at + 1) * number]) for at in range(len(names) + 1)]
        del found[: number * (len(names) + 1)]
        scales = np.array([_scale(name) for name in names])
        slopes = np.stack([(moved - errors[0]) * 2 for moved in errors[1:]], axis=1)  # per unit of the prior
        at = np.array([case.constants[name] for name in names]) / scales
        doubt = (at - np.array([_NOTHING[name] for name in names]) / scales) * _DOUBT
        step, *_ = np.linalg.lstsq(
            np.vstack([slopes, _DOUBT * np.eye(len(names))]), -np.concatenate([errors[0], doubt]), rcond=None
        )
        moved = (at + step) * scales
        case.constants = {name: _within(name, value) for name, value in zip(names, moved.tolist(), strict=True)}


def _errors(rows: Sequence[ServingRow], found: Sequence[Prediction]) -> NDArray[np.float64]:
    errors: list[float] = []
    for row, one in zip(rows, found, strict=True):
        assert one.tpot_ms is not None
        assert one.ttft_ms is not None
        errors.append(one.tpot_ms / row.measured["tpot_ms"] - 1)
        errors.append((one.ttft_ms / row.measured["ttft_ms"] - 1) * _TTFT_WEIGHT if row.ttft_counts else 0.0)
    return np.array(errors).clip(-_MOST_ERROR, _MOST_ERROR)


def _scale(name: str) -> float:
    return _SCALE.get(name, _FACTOR_SCALE)


def _within(name: str, value: float) -> float:
    return min(max(value, _LEAST_FACTOR), _MOST_FACTOR) if name.endswith("factor") else max(value, 0.0)
