"""Fits a GPU's and an engine's constants to whole runs of a benchmark: what a user can measure without a profiler.

A handful of runs tell a handful of factors, not dozens of constants:

    flops       of products, experts and prefill attention      bandwidth    of products, experts and decode attention
    step_ms     the host's time of a step                       prefill_ms   and of one with prompts
    gb_per_second   between the GPUs, if there are several

They are found by least squares on ln(simulated / measured) of each run's figures, pulled weakly towards the start. A
factor that the runs do not determine is found by its standard error, and stays. The error on further runs is estimated
from the fit itself: of a linear fit a run's error without it is its error divided by what it does not explain of itself
(the leverage), I - H.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lorrery.service.errors import LorreryError
from lorrery.validation.posted import PostedPrediction, PostedRow, predict, settings_of
from lorrery.validation.serving import in_processes
from lorrery.validation.serving_run import Options
from lorrery.worker.build import deployment_of
from lorrery.worker.device.calibration.catalogue_file import engine_toml, to_toml
from lorrery.worker.device.calibration.steps import Floats, least_squares, slopes, soften
from lorrery.worker.device.catalogue.hardware import AllReduce, Basis, Gpu
from lorrery.worker.device.catalogue.tables import Catalogue
from lorrery.worker.device.deployment import Engine
from lorrery.worker.device.kernels import compute_type
from lorrery.worker.device.moe import expert_type

PULL = 0.05
"""Towards the start, for a factor of e."""
MOST_ERROR = 0.25
"""Standard error of a factor's logarithm above which the runs do not determine it."""
WEIGHTS: Mapping[str, float] = {"out_tps": 1.0, "tpot": 1.0, "e2e": 1.0, "ttft": 0.4}
"""First tokens scatter more, and depend on who sends."""
_APART = 0.05
_MOST_ITERATIONS = 4
"""Each simulates every run some six times; a fifth changes no second digit."""
_SOFT = 0.2
"""Error beyond which it counts by its size, not its square: one run may be off for a reason of its own."""
_LEAST_MS = 0.2
"""Start of a host's time of 0, whose logarithm cannot move."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One unknown.

    Attributes:
        name: of the constants that it moves.
        start: value, or 1 for a factor on several constants.
        value: fitted.
        error: its relative standard error.
        kept: whether the runs do not determine it, so that it stays at its start.
        told_by: the runs that would.
    """

    name: str
    start: float
    value: float
    error: float
    kept: bool
    told_by: str


@dataclass(frozen=True, slots=True)
class RunFit:
    """A fit to runs.

    Attributes:
        factors: in order of the module's list.
        before: the runs with the constants at their start.
        after: with the fitted ones.
        unseen: relative errors of each run by figure, as without the run in the fit.
        catalogue: the text of a catalogue's file.
    """

    factors: Sequence[Factor]
    before: Sequence[PostedPrediction]
    after: Sequence[PostedPrediction]
    unseen: Sequence[Mapping[str, float]]
    catalogue: str


_TOLD_BY: Mapping[str, str] = {
    "flops": "long prompts, or many clients",
    "bandwidth": "few clients and long outputs",
    "step_ms": "one client, on a small model",
    "prefill_ms": "short prompts of few clients, with their TTFT",
    "gb_per_second": "several GPUs",
}


def fit_runs(
    rows: Sequence[PostedRow], gpu: Gpu, catalogue: Catalogue, options: Options, source: str, jobs: int
) -> RunFit:
    """Fit constants to runs.

    Args:
        rows: of one GPU and engine, named in their flags.
        gpu: at the start.
        catalogue: with the engine as it is at the start.
        options: with the catalogue's files.
        source: of the constants, for the file.
        jobs: processes.

    Raises:
        LorreryError: runs of several engines, or one that cannot be simulated.
    """
    with TemporaryDirectory() as folder:
        runs = _Runs(rows, gpu, catalogue, options, source, jobs, Path(folder) / "own.toml")
        before = runs.predicted({})
        free, fitted = runs.names, _Fitted({}, {}, np.zeros((0, 0)))
        while True:
            fitted = runs.fitted(free, fitted.factors)
            worst = max(free, key=fitted.errors.__getitem__)
            if fitted.errors[worst] <= MOST_ERROR or len(free) == 1:
                break
            runs.errors_of[worst] = fitted.errors[worst]
            free = [name for name in free if name != worst]
        after = runs.predicted(fitted.factors)
        errors = {**runs.errors_of, **fitted.errors}
        factors = [_factor(name, runs.engine, fitted.factors, errors[name]) for name in runs.names]
        unseen = runs.unseen(after, fitted.hat)
        return RunFit(factors, before, after, unseen, runs.text(fitted.factors))


@dataclass(frozen=True, slots=True)
class _Fitted:
    """Factors, their relative standard errors, and the matrix from measured to fitted figures."""

    factors: Mapping[str, float]
    errors: Mapping[str, float]
    hat: Floats


class _Runs:
    """The runs, simulated under any factors."""

    def __init__(
        self,
        rows: Sequence[PostedRow],
        gpu: Gpu,
        catalogue: Catalogue,
        options: Options,
        source: str,
        jobs: int,
        path: Path,
    ) -> None:
        self._rows, self._gpu, self._source, self._jobs, self._path = rows, gpu, source, jobs, path
        self._options = replace(options, catalogue=(*options.catalogue, path))
        self.errors_of: dict[str, float] = {}
        self.names = ["flops", "bandwidth", "step_ms", "prefill_ms"]
        if any(row.flags.get("worker.tensor_parallel", 1) > 1 for row in rows):
            self.names.append("gb_per_second")
        self._measured = [(index, name) for index, row in enumerate(rows) for name in row.measured]
        self._weights = np.array([WEIGHTS.get(name.partition("_p")[0], 1.0) for _, name in self._measured])
        path.write_text(to_toml(gpu, source, modern=True), "utf-8")
        engines = {settings_of(row, self._options).worker.engine for row in rows}
        if len(engines) > 1:
            raise LorreryError(f"runs of several engines, {', '.join(sorted(engines))}: fit each by itself")
        self.engine = catalogue.engine(engines.pop(), gpu)
        self._used = _tables(rows, self._options)

    def text(self, factors: Mapping[str, float]) -> str:
        """Return a catalogue's file with these factors."""
        return _text(self._gpu, self.engine, factors, self._used, self._source)

    def predicted(self, factors: Mapping[str, float]) -> list[PostedPrediction]:
        """Simulate the runs."""
        self._path.write_text(self.text(factors), "utf-8")
        runs, efforts = [(row, self._options) for row in self._rows], [row.num_requests for row in self._rows]
        found = in_processes(predict, runs, efforts, jobs=self._jobs)
        if why := next((one.why for one in found if one.why), ""):
            raise LorreryError(why)
        return found

    def errors(self, found: Sequence[PostedPrediction]) -> Floats:
        """Return ln(simulated / measured) of every figure, weighted."""
        logs = [np.log(found[index].figures[name] / self._rows[index].measured[name]) for index, name in self._measured]
        raw: Floats = self._weights * np.array(logs)
        return raw

    def fitted(self, free: Sequence[str], start: Mapping[str, float]) -> _Fitted:
        """Fit some of the factors; `start`: where to begin, 1 where it does not say."""

        def loss(logs: Floats) -> Floats:
            factors = dict(zip(free, np.exp(logs).tolist(), strict=True))
            return np.append(soften(self.errors(self.predicted(factors)), _SOFT), PULL * logs)

        begin = np.log([start.get(name, 1.0) for name in free])
        logs, _ = least_squares(loss, begin, apart=_APART, most=_MOST_ITERATIONS)
        now, num = loss(logs), len(self._measured)
        change = slopes(loss, logs, now, _APART)
        scatter = max(float(now[:num] @ now[:num]) / max(num - len(free), 1), 0.02**2)
        inverse = np.linalg.inv(change.T @ change)
        errors = np.sqrt(np.diag(inverse) * scatter).tolist()
        return _Fitted(
            dict(zip(free, np.exp(logs).tolist(), strict=True)),
            dict(zip(free, errors, strict=True)),
            change[:num] @ inverse @ change[:num].T,
        )

    def unseen(self, after: Sequence[PostedPrediction], hat: Floats) -> list[Mapping[str, float]]:
        """Return each run's relative errors as if it had not been in the fit."""
        left, found = self.errors(after), list[Mapping[str, float]]()
        for number in range(len(self._rows)):
            at = [place for place, (index, _) in enumerate(self._measured) if index == number]
            alone = np.linalg.lstsq(np.eye(len(at)) - hat[np.ix_(at, at)], left[at], rcond=1e-3)[0] / self._weights[at]
            names = [self._measured[place][1] for place in at]
            found.append({name: float(np.expm1(error)) for name, error in zip(names, alone, strict=True)})
        return found


def _tables(rows: Sequence[PostedRow], options: Options) -> set[str]:
    """Return which of a fit's tables the runs use: `gemm.bf16`, `attention.bf16`, `moe.mxfp4`."""
    found: set[str] = set()
    for row in rows:
        deployment = deployment_of(settings_of(row, options))
        weight_type = compute_type(deployment.gpu, deployment.precision.weight_type)[1]
        found |= {f"gemm.{weight_type}", f"attention.{deployment.precision.kv_type}"}
        if deployment.model.num_experts > 1:
            found.add(f"moe.{expert_type(deployment)}")
    return found


def _factor(name: str, engine: Engine, factors: Mapping[str, float], error: float) -> Factor:
    start = _start_ms(engine, name) if name.endswith("_ms") else 1.0
    return Factor(name, start, start * factors.get(name, 1.0), error, name not in factors, _TOLD_BY[name])


def _start_ms(engine: Engine, name: str) -> float:
    return getattr(engine, name) or _LEAST_MS


def _text(gpu: Gpu, engine: Engine, factors: Mapping[str, float], used: set[str], source: str) -> str:
    """Return the catalogue's file with these factors."""
    host: dict[str, Any] = {
        name: _start_ms(engine, name) * factors[name] for name in ("step_ms", "prefill_ms") if name in factors
    }
    basis: Basis = "fitted" if host else "assumed"
    own_engine = replace(engine, gpus=(gpu.name,), source=source, basis=basis, **host)
    return to_toml(_scaled_gpu(gpu, factors, used, source), source, modern=True) + engine_toml(own_engine, gpu)


def _scaled_gpu(gpu: Gpu, factors: Mapping[str, float], used: set[str], source: str) -> Gpu:
    fit = gpu.modern_fit
    arithmetic = {"flops": "flops", "prefill_flops": "flops"}
    memory = {"bandwidth": "bandwidth", "decode_bandwidth": "bandwidth"}

    def scaled(record: Any) -> Any:  # noqa: ANN401  any of a fit's tables
        return replace(
            record,
            **{
                name: getattr(record, name) * factors.get(factor, 1.0)
                for name, factor in {**arithmetic, **memory}.items()
                if hasattr(record, name)
            },
        )

    parts: dict[str, Any] = {part: {kind: scaled(one) for kind, one in getattr(fit, part).items()} for part in _PARTS}
    others = {f"{part}.{kind}" for part in _PARTS for kind in getattr(fit, part)} - used
    assumed = tuple(sorted({"elementwise", *others}))
    new = replace(fit, **parts, basis="fitted", source=source, gpus=(gpu.name,), assumed=assumed)
    return replace(gpu, modern_fit=new, modern_all_reduce=_scaled_link(gpu, factors.get("gb_per_second"), source))


_PARTS = ("gemm", "attention", "moe")


def _scaled_link(gpu: Gpu, factor: float | None, source: str) -> AllReduce | None:
    link = gpu.modern_all_reduce
    if factor is None:
        return link
    link = link or gpu.all_reduce
    return replace(
        link,
        gb_per_second=link.gb_per_second * factor,
        by_degree=tuple((degree, bandwidth * factor) for degree, bandwidth in link.by_degree),
        basis="fitted",
        source=source,
        gpus=(gpu.name,),
    )
