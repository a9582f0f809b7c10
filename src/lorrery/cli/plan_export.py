"""A plan's answer for programs: as JSON, and as what deploys it: the engine's flags, and values of the Helm chart.

`lorrery serve` takes the flags of vLLM, and the chart the settings file: simulating either gives the plan's figures.
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter

from lorrery.cli.plan_search import answer_lines
from lorrery.cli.plan_text import measured_near, requests_in_words
from lorrery.cli.serve.settings import settings_tables
from lorrery.service.files.reading import to_toml
from lorrery.service.installed import VERSION
from lorrery.service.settings.cluster import changed
from lorrery.simulator.plan.cluster import Search
from lorrery.simulator.plan.options import PlanOptions
from lorrery.simulator.plan.search import Proof
from lorrery.simulator.plan.shapes import Shape
from lorrery.simulator.plan.trials import Trial
from lorrery.worker.build import read_catalogue

__all__ = ["engine_command", "helm_values", "search_json"]

_NAMES: Mapping[str, tuple[str, str]] = {
    "worker.tensor_parallel": ("--tensor-parallel-size", "--tp-size"),
    "worker.weight_dtype": ("--quantization", "--quantization"),
    "worker.kv_dtype": ("--kv-cache-dtype", "--kv-cache-dtype"),
    "scheduler.max_num_seqs": ("--max-num-seqs", "--max-running-requests"),
    "scheduler.max_num_batched_tokens": ("--max-num-batched-tokens", "--chunked-prefill-size"),
    "scheduler.max_req_total_len": ("--max-model-len", "--context-length"),
    "scheduler.block_size": ("--block-size", "--page-size"),
    "adapters.max_loras": ("--max-loras", "--max-loras-per-batch"),
    "adapters.max_cpu_loras": ("--max-cpu-loras", "--max-loaded-loras"),
    "adapters.max_lora_rank": ("--max-lora-rank", "--max-lora-rank"),
}
"""Setting -> its flag of vLLM and of SGLang; both name a type of weights or of the KV cache as `_TYPES`."""
_TYPES = {"int4": "awq", "nvfp4": "modelopt_fp4"}
_UNQUANTIZED = {"bfloat16": "bfloat16", "float16": "half"}
_PROGRAMS = {"vllm": "vllm serve", "sglang": "python -m sglang.launch_server --model-path"}


def engine_command(shape: Shape) -> str | None:
    """Return the command that starts a replica's engine, with the flags that differ from its defaults.

    None: the settings are not of vLLM or SGLang.
    """
    settings = shape.settings
    family = (settings.engine or "").partition("-")[0]
    if family not in _PROGRAMS:
        return None
    place = list(_PROGRAMS).index(family)
    usual = changed({}, {"model": settings.model, "engine": settings.engine, "worker.gpu": settings.worker.gpu})
    words = [*_PROGRAMS[family].split(), settings.model]
    if settings.adapters.expand():
        words.append("--enable-lora")
    for key, names in _NAMES.items():
        value = attrgetter(key)(settings)
        if value is None or value == attrgetter(key)(usual):
            continue
        if key == "worker.weight_dtype" and value in _UNQUANTIZED:
            words += ["--dtype", _UNQUANTIZED[value]]
        else:
            words += [names[place], _TYPES.get(value, str(value))]
    return shlex.join(words)


def helm_values(shape: Shape, num_replicas: int) -> str:
    """Return values of the chart, as YAML: the settings file of the answer, and its replicas."""
    lines = to_toml(settings_tables(shape.settings)).splitlines()
    return "\n".join(
        ["config: |", *(f"  {line}" if line else "" for line in lines), "worker:", f"  replicas: {num_replicas}", ""]
    )


def search_json(search: Search, options: PlanOptions) -> dict[str, object]:
    """Return everything about an answer, as JSON has it and the page reads it."""
    answer, shape, asked = search.answer, search.answer.shape, search.asked
    found: dict[str, object] = {
        "question": None
        if options.rate is None
        else f"{options.rate:g} requests/s of {requests_in_words(options.work)}",
        "service_level": str(options.level),
        "limits": {bound.name: bound.limit for bound in options.level.bounds},
        "replicas": answer.num_replicas or None,
        "gpus": answer.num_gpus or None,
        "usd_per_hour": answer.usd_per_hour,
        "shape": None if shape is None else shape.name,
        "changes": None if shape is None else shape.changes,
        "says": answer_lines(search, options),
        "finished": answer.finished,
        "num_trials": answer.num_trials,
        "num_requests": None if asked is None else asked.num_requests,
        "span_seconds": search.span_seconds,
        "bound": None if search.least is None else [search.least.name, search.least.least],
        "proofs": [_proof_json(proof) for proof in answer.proofs],
        "rejected": [_cluster_json(one.shape, one.num_replicas, one.trial) for one in answer.rejected],
        "not_shapes": search.not_shapes,
        "tenants": None if search.tenants is None else asdict(search.tenants),
        "command": search.command,
        "tiles": _tiles(search, options),
        "deploy": {},
        "trust": [
            f"Every figure is simulated: {_runs_in_words(search)} of Poisson arrivals with Lorrery {VERSION}.",
            *([] if shape is None else [measured_near(shape.settings, options.work)]),
            "Step times are the model's (docs/step-time.md); docs/validation.md has all that it was held against.",
        ],
    }
    if shape is not None:
        found["deploy"] = {
            "A replica's engine": engine_command(shape),
            f"Helm values of the Lorrery chart for all {answer.num_replicas}": helm_values(shape, answer.num_replicas),
            "The run that decided it": search.command,
        }
    if search.around is not None and shape is not None:
        found["offers"] = [_cluster_json(one.shape, one.trial.num_replicas, one.trial) for one in search.around.offers]
        found["variations"] = [
            {"what": what, "figures": trial.figures, "met": trial.met} for what, trial in search.around.variations
        ]
    return found


def _runs_in_words(search: Search) -> str:
    asked = search.asked
    return "no runs" if asked is None else f"{search.answer.num_trials} runs of {asked.num_requests:,} requests"


def _tiles(search: Search, options: PlanOptions) -> list[tuple[str, str, str]]:
    """Return the answer's main figures: name, value, and what goes beside it."""
    answer, shape, asked = search.answer, search.answer.shape, search.asked
    if shape is None or asked is None:
        return []
    usd = answer.usd_per_hour
    price = read_catalogue(shape.settings.catalogue).price(shape.gpu)
    millions = asked.rate * options.work.output_tokens * 3600 / 1e6
    tiles = [
        ("replicas", str(answer.num_replicas), f"each {shape.num_gpus} x {shape.gpu}"),
        ("GPUs", str(answer.num_gpus), ""),
    ]
    if usd is not None and price is not None:
        tiles += [
            ("cost", f"${usd:,.2f}/h", f"{price.source}, {price.date}"),
            ("per million", f"${usd / millions:,.2f}", "output tokens"),
        ]
    return tiles


def _proof_json(proof: Proof) -> dict[str, object]:
    names = ("num_replicas", "means", "margins", "met", "is_clear")
    seeds = [{"seed": trial.seed, **trial.figures} for trial in proof.trials]
    return {**{name: getattr(proof, name) for name in names}, "seeds": seeds}


def _cluster_json(shape: Shape, number: int, trial: Trial | None) -> dict[str, object]:
    usd = shape.usd_per_hour
    found: dict[str, object] = {
        "shape": shape.name, "changes": shape.changes, "replica": f"{shape.num_gpus} x {shape.gpu}",
        "num_replicas": number, "gpus": number * shape.num_gpus, "usd_per_hour": None if usd is None else usd * number,
    }  # fmt: skip
    if trial is None:
        return {**found, "figures": None}
    why = trial.failure if trial.num_failed else ""
    return {**found, "figures": trial.figures, "met": trial.met, "num_ended": trial.num_ended, "failure": why}
