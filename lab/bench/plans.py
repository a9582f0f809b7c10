"""Twenty capacity questions: does `lorrery plan` find what simulating every cluster finds, and how fast?

Each question is asked as `lorrery plan --rate` asks it, on all cores. Then every combination is simulated with 1, 2, 3,
... replicas until it keeps the level or costs more than what the plan found: without bounds, without an order, without
giving up early. The answers have to cost the same. Both use one seed, so that they judge the same runs.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from rich.table import Table

import lorrery
from lab.bench.cluster import BenchBrokenError
from lab.bench.marks import meets
from lorrery.service.linux import num_cores
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.arguments import read_table
from lorrery.simulator.plan.options import PlanOptions
from lorrery.simulator.plan.plan import Plan
from lorrery.simulator.plan.trials import load_of, serve

AIM_SECONDS = 60.0
NUM_REQUESTS = 1500


@dataclass(frozen=True, slots=True)
class Question:
    """One question; attributes as of `lorrery.plan`."""

    model: str
    work: Mapping[str, Any]
    slo: Mapping[str, float]
    search: Mapping[str, list[Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, jobs: int | None, num_requests: int = NUM_REQUESTS) -> Plan:
        """Plan."""
        return lorrery.plan(**self._given, num_requests=num_requests, jobs=jobs)

    @property
    def options(self) -> PlanOptions:
        """The options of the plan, checked."""
        return read_table(PlanOptions(**self._given))

    @property
    def _given(self) -> dict[str, Any]:
        own = {"engine": "vllm", "model": self.model, **self.settings}
        own = {key: value for key, value in own.items() if value is not None}
        return {**self.work, "slo": self.slo, "search": self.search, "seeds": 1, "overrides": own}

    @property
    def title(self) -> str:
        """It in words."""
        slo = ", ".join(f"{name} {limit:g}" for name, limit in self.slo.items())
        return f"{self.model}, {self.work['rate']}/s, {self.work.get('adapters', 0)} adapters: {slo}"


_CHAT = {"prompt_tokens": (200, 600), "output_tokens": (50, 150)}
_LONG = {"prompt_tokens": (1500, 2000), "output_tokens": 200}
_LORA = {**_CHAT, "adapters": 8, "adapter_exponent": 1.0}
_TP = "worker.tensor_parallel"
_GPU = "worker.gpu"
_SLOTS = "adapters.max_loras"
_PLACE = "scheduler.placement"

QUESTIONS = (
    Question("Llama-3.1-8B", {**_CHAT, "rate": 20}, {"ttft_p95": 0.5}, {_TP: [1, 2], _GPU: ["L40S"]}),
    Question(
        "Llama-3.1-8B",
        {**_LORA, "rate": 12},
        {"ttft_p95": 1.0, "goodput": 0.9},
        {_TP: [1, 2], _GPU: ["L40S"], _SLOTS: [2, 8], _PLACE: ["adapter_hash", "least_loaded"]},
    ),
    Question(
        "Llama-3.1-8B",
        {"prompt_tokens": 900, "output_tokens": 80, "rate": 10},
        {"tpot_mean": 0.035, "ttft_p90": 2.0},
        {_TP: [1, 2], _GPU: ["L40S", "A100-80-SXM"], "scheduler.max_num_seqs": [16, 64]},
    ),
    Question(
        "Llama-3.1-8B",
        {**_CHAT, "rate": 300},
        {"ttft_p99": 1.0, "tpot_p99": 0.05},
        {_GPU: ["L40S", "H100-SXM", "A10G"]},
    ),
    Question(
        "Llama-3.1-8B", {**_LONG, "rate": 75}, {"ttft_p95": 0.5, "tpot_p95": 0.03}, {_GPU: ["H100-SXM", "H200-SXM"]}
    ),
    Question("Llama-3.1-70B", {**_CHAT, "rate": 75}, {"ttft_p95": 1.0}, {_GPU: ["H100-SXM", "A100-80-SXM"]}),
    Question(
        "Llama-3.1-70B",
        {**_LONG, "rate": 30},
        {"ttft_p95": 2.0, "tpot_mean": 0.05},
        {_GPU: ["H100-SXM", "H200-SXM"], "worker.weight_dtype": ["bfloat16", "fp8"]},
    ),
    Question(
        "Llama-3.1-8B",
        {**_CHAT, "rate": 125},
        {"tpot_p90": 0.04},
        {_GPU: ["L4", "A10G", "L40S"], "worker.weight_dtype": ["bfloat16", "fp8"]},
    ),
    Question(
        "Qwen3-14B",
        {**_CHAT, "rate": 100},
        {"ttft_mean": 0.2, "e2e_p95": 6},
        {_GPU: ["A100-80-SXM", "H100-SXM"], _TP: [1, 2, 4]},
    ),
    Question(
        "Qwen3-32B",
        {**_LONG, "rate": 40},
        {"goodput": 0.95, "ttft_p50": 1.0},
        {_GPU: ["A100-80-SXM", "H100-SXM"], _TP: [1, 2, 4]},
    ),
    Question(
        "Mixtral-8x7B", {**_CHAT, "rate": 100}, {"ttft_p95": 0.8}, {_GPU: ["A100-80-SXM", "H100-SXM"], _TP: [2, 4]}
    ),
    Question(
        "Llama-3.1-8B",
        {**_LONG, "rate": 50},
        {"ttft_p99": 1.5},
        {_GPU: ["L40S"], "scheduler.max_num_batched_tokens": [1024, 2048, 8192], _TP: [1, 2]},
    ),
    Question(
        "Llama-3.1-8B",
        {**_CHAT, "rate": 150},
        {"ttft_p95": 0.5, "tpot_mean": 0.03},
        {_GPU: ["L40S", "H100-SXM"], _TP: [1, 2]},
        {"engine": "sglang"},
    ),
    Question(
        "Llama-3.1-70B",
        {**_CHAT, "rate": 100},
        {"ttft_p95": 1.0, "tpot_p99": 0.06},
        {_GPU: ["H200-SXM", "B200"], _TP: [1, 2, 4]},
        {"engine": "trtllm", "worker.weight_dtype": "fp8", "worker.kv_dtype": "fp8"},
    ),
    Question(
        "Llama-2-7B",
        {"prompt_tokens": (100, 400), "output_tokens": (20, 120), "rate": 50},
        {"ttft_p95": 2.0},
        {_GPU: ["A10G", "L4"], _TP: [1], "scheduler.running_max_req_size": [10, 30]},
        {"engine": None},
    ),
    Question(
        "Llama-3.1-8B",
        {**_CHAT, "rate": 100, "adapters": 40, "ranks": (8, 64)},
        {"ttft_p95": 1.0},
        {_GPU: ["L40S", "A100-80-SXM"], _TP: [1], _SLOTS: [4, 40], _PLACE: ["adapter_hash", "least_loaded"]},
    ),
    Question(
        "Llama-3.1-70B",
        {**_LONG, "rate": 25, "adapters": 60},
        {"ttft_p95": 1.0},
        {_GPU: ["H100-SXM"], _TP: [4, 8], _SLOTS: [8, 60], _PLACE: ["adapter_shards", "least_loaded"]},
    ),
    Question(
        "Llama-3.1-8B",
        {**_LORA, "rate": 100, "adapters": 200},
        {"ttft_p90": 1.0, "tpot_mean": 0.06},
        {
            _GPU: ["L40S"],
            _TP: [1],
            _SLOTS: [8, 32],
            "adapters.max_cpu_loras": [32, 200],
            _PLACE: ["adapter_hash", "least_loaded"],
        },
    ),
    Question(
        "Llama-3.1-8B",
        {**_LORA, "rate": 75, "adapters": 30},
        {"e2e_p95": 8.0},
        {_GPU: ["L40S", "H100-SXM"], _TP: [1, 2], _SLOTS: [8, 30]},
        {"scheduler.placement": "adapter_shards"},
    ),
    Question(
        "Llama-3.1-8B",
        {**_CHAT, "rate": 15},
        {"tpot_p99": 0.012},
        {_GPU: ["L40S", "H100-SXM", "H200-SXM"], _TP: [1, 2, 4]},
    ),
)
"""The first three are small enough for a test; the others take seconds compiled, and up to minutes interpreted."""


@dataclass(frozen=True, slots=True)
class Found:
    """One question's answers.

    Attributes:
        question: in words.
        answer: of the plan, in words.
        seconds: of the plan, by the wall clock.
        num_trials: runs of the plan.
        usd_per_hour: of its answer; infinite: none was found.
        exhaustive_usd: of the cheapest cluster of all.
        exhaustive_trials: runs that showed it.
    """

    question: str
    answer: str
    seconds: float
    num_trials: int
    usd_per_hour: float
    exhaustive_usd: float
    exhaustive_trials: int

    @property
    def equal(self) -> bool:
        """Whether both cost the same."""
        return abs(self.usd_per_hour - self.exhaustive_usd) < 1e-6


def cheapest_of_all(question: Question, plan: Plan, jobs: int, num_requests: int = NUM_REQUESTS) -> tuple[float, int]:
    """Return what the cheapest cluster that keeps the level costs per hour, and the runs that show it.

    Args:
        question: asked.
        plan: its answer, from which the combinations are taken.
        jobs: processes.
        num_requests: of each run.
    """
    assert plan.search is not None
    answer = plan.search.answer
    chosen = [] if answer.shape is None else [answer.shape]
    shapes = [
        (shape.settings, shape.usd_per_hour)
        for shape in (*chosen, *(one.shape for one in answer.rejected))
        if shape.usd_per_hour is not None
    ]
    if answer.usd_per_hour is None:
        raise BenchBrokenError(f"{question.title}: no cluster keeps the level: ask something that has an answer")
    run = partial(_cheapest_of, question, answer.usd_per_hour, num_requests)
    with ProcessPoolExecutor(jobs) as processes:
        found = list(processes.map(run, shapes))
    return min(usd for usd, _ in found), sum(number for _, number in found)


def _cheapest_of(
    question: Question, most: float, num_requests: int, shape: tuple[Settings, float]
) -> tuple[float, int]:
    """Return what the fewest replicas cost that keep the level (infinite: more than `most`), and the runs made."""
    settings, usd = shape
    options = question.options
    load = load_of(options.work, question.work["rate"], num_requests)
    number = 0
    while (number + 1) * usd <= most + 1e-6:
        number += 1
        if serve(settings, load, options.level, number, gives_up=False).met:
            return number * usd, number
    return inf, number


def measure(tell: Callable[[str], None], questions: Sequence[Question] = QUESTIONS) -> list[Found]:
    """Ask all questions, and check each answer."""
    jobs, found = num_cores(), []
    for number, question in enumerate(questions, start=1):
        tell(f"{number} of {len(questions)}: {question.title}")
        began = time.perf_counter()
        plan = question.ask(jobs)
        seconds = time.perf_counter() - began
        usd, num_trials = cheapest_of_all(question, plan, jobs)
        assert plan.search is not None
        answer = plan.search.answer
        assert answer.shape is not None
        found.append(
            Found(
                question.title,
                f"{answer.num_replicas} x {answer.shape.name}",
                seconds,
                answer.num_trials,
                answer.usd_per_hour or inf,
                usd,
                num_trials,
            )
        )
    return found


def plans_table(found: Sequence[Found]) -> Table:
    """Return the table to print."""
    table = Table(title=f"plans (aim: equal, each below {AIM_SECONDS:g} s)", title_justify="left")
    for name in ("question", "answer"):
        table.add_column(name, max_width=44)
    for name in ("$/h", "of all, $/h", "runs", "of all, runs", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in found:
        table.add_row(
            one.question, one.answer, f"{one.usd_per_hour:.2f}", f"{one.exhaustive_usd:.2f}", str(one.num_trials),
            str(one.exhaustive_trials), f"{one.seconds:.1f}", meets(met=one.equal and one.seconds < AIM_SECONDS),
        )  # fmt: skip
    return table
