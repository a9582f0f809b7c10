"""Simulates a measured run as its source ran it: the engine's preset, its flags, and the source's closed loop.

`SOURCES` has what is known of each source beyond its rows. TTFT and TPOT are computed as there: means over requests,
TPOT = (E2E - TTFT) / (n - 1). An engine that streams k tokens in a message shows its first token k - 1 steps late, and
its TPOT covers n - k tokens.

For ablations and refits the catalogue differs in places from the shipped one. The changed entries are written to a file
so that simulating processes can read them, with the same effect as a user's own catalogue.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lorrery.loadgen.options import GIVEN, LoadOptions
from lorrery.loadgen.workload.arrays import Requests
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.files.reading import read_tables, to_toml
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.presets import nearest
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.options import Observers, SimulationOptions
from lorrery.simulator.run import SimulatedRun
from lorrery.validation.serving_rows import ServingRow
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.catalogue.tables import FORMAT, PACKAGE

PS_PER_MS = PS_PER_SECOND // 1000
_TIMEOUT_SECONDS = 1e6
ADAPTER = "adapter"
CLIENT_TIME, DRAWN_LENGTHS, MESSAGES = "client-time", "drawn-lengths", "messages"
"""Knowledge about a source's clients, by the name under which it can be left out."""


@dataclass(frozen=True, slots=True)
class Clients:
    """Behaviour of a source's clients, where its rows do not have it.

    Attributes:
        requests_per_client: if the row has none.
        length_ratio: if the row has none.
        prompt_token_ms: delay of the first token against the engine's, per prompt token: the time of the client and the
            server's front end.
    """

    requests_per_client: int = 10
    length_ratio: float = 1.0
    prompt_token_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """How a source measured, where its rows do not say.

    Attributes:
        clients: of its runs.
        clients_of: of its runs of one engine, where they differ.
        flags: settings with which its servers were started.
        clients_bound_batch: whether max-num-seqs was the number of clients.
        version_of: an engine -> the version of those of its runs that state none; of others: the newest.
        drawn_after: versions of SGLang whose rows wrongly assume fixed lengths.
        marlin_on: GPUs on which experts in mxfp4 were computed by Marlin's kernel.
        own_tokens: of a prompt that are not in the prefix cache when it comes; None: all, and there is no cache.
    """

    clients: Clients = Clients()
    clients_of: Mapping[str, Clients] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    clients_bound_batch: bool = False
    version_of: Mapping[str, str] = field(default_factory=dict)
    drawn_after: tuple[str, ...] = ()
    own_tokens: int | None = None
    marlin_on: tuple[str, ...] = ()


OTHER = Source(flags={"scheduler.prefix_cache.kind": "none"})
"""Drawn prompts never repeat, so a prefix cache only costs."""
SOURCES: Mapping[str, Source] = {
    # github.com/SemiAnalysisAI/InferenceX, benchmarks/: --max-num-seqs $CONC, --no-enable-prefix-caching
    "inferencex": Source(
        flags={"scheduler.prefix_cache.kind": "none", "scheduler.max_num_batched_tokens": 8192},
        clients_bound_batch=True,
        version_of={"vllm": "0.11"},  # the newest when they were measured, in October 2025
        marlin_on=("H100-SXM",),  # benchmarks/gptoss_fp4_h100.sh: VLLM_MXFP4_USE_MARLIN=1
    ),
    # Made for this project (validation/data/README.md): the engine in a process of its own, without a server.
    "lorrery": Source(
        flags={
            "scheduler.prefix_cache.kind": "none",
            "scheduler.max_num_batched_tokens": 8192,
            "adapters.max_cpu_loras": 64,
            "worker.api_server_count": 0,
        },
    ),
    # vLLM's benchmark_latency: the same batch again and again, so that all but the first run find its prompts cached.
    "amd": Source(clients=Clients(1), own_tokens=16),
    # Not documented; found on the TTFT of every third row, docs/validation.md.
    "nvidia_internal": Source(
        clients=Clients(10, 0.95, prompt_token_ms=0.03),
        clients_of={"sglang": Clients(5, 0.95)},
        flags={"scheduler.prefix_cache.kind": "none"},
        drawn_after=("0.5.6",),
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the simulation of every row.

    Attributes:
        catalogue: files with further GPUs, models, engines.
        seed: of every draw.
        overrides: settings that win, `section.key=value`.
        without: knowledge about the clients to leave out.
    """

    catalogue: tuple[Path, ...] = ()
    seed: int = 0
    overrides: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()


AS_IT_IS = Options()


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's prediction for a row; or why there is none."""

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    why: str = ""


def predict(row: ServingRow, options: Options) -> Prediction:
    """Simulate a row."""
    if row.output_tokens <= row.stream_interval:
        return Prediction(why=f"no time per output token of {row.output_tokens} tokens")
    try:
        settings, load = settings_of(row, options), load_options(row, options)
    except SettingsError as error:
        return Prediction(why=reason(error))
    try:
        ended = simulated(settings, load)
    except LorreryError as error:
        return Prediction(why=reason(error))
    tpot_ms, ttft_ms = _means(ended, 1 if MESSAGES in options.without else row.stream_interval)
    if CLIENT_TIME not in options.without:
        ttft_ms += clients_of(row).prompt_token_ms * row.input_tokens
    return Prediction(tpot_ms, ttft_ms)


def simulated(settings: Settings, load: LoadOptions, requests: Requests | None = None) -> list[SimulatedRequest]:
    """Return the requests of a run on one worker.

    Args:
        settings: of the server.
        load: of its clients.
        requests: for the workload `given`.

    Raises:
        LorreryError: impossible settings or options, or a request that did not finish.
    """
    ended: list[SimulatedRequest] = []
    SimulatedRun(settings, load, SimulationOptions(workers=1), requests, Observers(on_end=ended.append)).run()
    failed = next((request for request in ended if request.outcome != "finished"), None)
    if failed is not None:
        raise LorreryError(failed.detail or failed.outcome or "a request did not finish")
    return ended


def played(settings: Settings, requests: Requests, clients: int | None) -> list[SimulatedRequest]:
    """Return the requests of a run that plays given ones: at their times, or by so many clients in a closed loop.

    Raises:
        LorreryError: as `simulated`.
    """
    number = np.size(requests.at_seconds)
    load = LoadOptions(workload=GIVEN, num_requests=number, concurrency=clients, timeout=_TIMEOUT_SECONDS)
    return simulated(settings, load, requests)


def source_of(row: ServingRow) -> Source:
    """Return what is known of the row's source."""
    return SOURCES.get(row.cells.get("source", "").strip(), OTHER)


def clients_of(row: ServingRow) -> Clients:
    """Return what is known of the row's clients."""
    source = source_of(row)
    return source.clients_of.get(row.backend, source.clients)


def settings_of(row: ServingRow, options: Options) -> Settings:
    """Return the settings of the row's server.

    Raises:
        SettingsError: an unknown engine, GPU, model or type, or an invalid combination.
    """
    source = source_of(row)
    weight_dtype = row.weight_dtype
    if weight_dtype == "fp8" and row.fp8_scaling == "block":
        weight_dtype = "fp8_block"
    overrides: dict[str, object] = {
        "engine": engine_of(row),
        "model": row.model,
        "worker.gpu": row.gpu,
        "worker.tensor_parallel": row.tensor_parallel,
        "worker.expert_parallel": max(row.moe_ep, 1),
        "worker.weight_dtype": weight_dtype,
        "worker.kv_dtype": _kv_dtype(row),
        **source.flags,
    }
    if weight_dtype == "mxfp4" and row.gpu in source.marlin_on:
        overrides["worker.moe_backend"] = "marlin"
    if row.max_num_seqs or source.clients_bound_batch:
        overrides["scheduler.max_num_seqs"] = row.max_num_seqs or row.concurrency
    if row.max_loras:
        overrides["adapters.max_loras"] = row.max_loras
    if row.adapters:
        overrides["adapters.registry"] = [{"id": ADAPTER, "rank": row.adapter_rank, "count": row.adapters}]
        overrides["adapters.max_lora_rank"] = row.adapter_rank
        overrides["adapters.target_modules"] = row.adapter_projections
    if options.catalogue:
        overrides["catalogue"] = options.catalogue
    return changed(changed({}, overrides), options.overrides)


def load_options(row: ServingRow, options: Options) -> LoadOptions:
    """Return the workload of the row's clients."""
    clients = clients_of(row)
    guessed = row.backend == "sglang" and row.version.startswith(source_of(row).drawn_after)
    ratio = clients.length_ratio if row.length_ratio is None or guessed else row.length_ratio
    if DRAWN_LENGTHS in options.without:
        ratio = 1.0
    own = source_of(row).own_tokens
    cached = 0 if own is None else max(row.input_tokens - own, 0)
    return LoadOptions(
        input_tokens=row.input_tokens - cached,
        shared_prefix=(cached, 1) if cached else None,
        output_tokens=row.output_tokens,
        length_ratio=ratio,
        adapters="all" if row.adapters else None,
        adapter_exponent=0.0 if row.adapters else None,
        concurrency=row.concurrency,
        requests_per_client=row.requests_per_client or clients.requests_per_client,
        seed=options.seed,
        timeout=_TIMEOUT_SECONDS,
    )


def _kv_dtype(row: ServingRow) -> str:
    """Return the cache's type: the row's, but 8 bits for ModelOpt's fp8 checkpoints on TensorRT-LLM.

    The source does not state it; with 16 bits the batches of those runs do not fit, and they did not queue.
    """
    if row.backend == "trtllm" and row.weight_dtype == "fp8" and row.fp8_scaling == "tensor":
        return "fp8"
    return row.kv_dtype or "bfloat16"


def _means(ended: list[SimulatedRequest], interval: int) -> tuple[float, float]:
    arrived = np.array([request.arrived_ps for request in ended])
    first = np.array([request.first_token_ps or 0 for request in ended])
    finished = np.array([request.finished_ps or 0 for request in ended])
    tokens = np.array([request.output_tokens for request in ended])
    step_ps = (finished - first) / np.maximum(tokens - 1, 1)
    ttft_ps = first - arrived + (interval - 1) * step_ps
    return float(step_ps.mean() / PS_PER_MS), float(ttft_ps.mean() / PS_PER_MS)


def reason(error: LorreryError) -> str:
    """Return an error's first line, for a row without a prediction."""
    return str(error).splitlines()[0]


def engine_of(row: ServingRow) -> str:
    """Return the name of the row's engine, in the version nearest to its own.

    Raises:
        SettingsError: unknown engine.
    """
    return nearest(row.backend, row.version or source_of(row).version_of.get(row.backend, "")).name


Tables = dict[str, dict[str, dict[str, Any]]]
"""Kind of entry -> name -> the entry as in its file."""
Change = Callable[[Tables], None]
_BY_NAME, _LISTED = ("fits", "links", "engines"), ("gpu", "model")


def tables_of(catalogue: Iterable[Path] = ()) -> Tables:
    """Return all entries: the shipped ones, overridden by those of further files."""
    found: Tables = {kind: {} for kind in (*_BY_NAME, *_LISTED)}
    for _, table in read_tables(PACKAGE, catalogue):
        for kind in _BY_NAME:
            found[kind] |= table.get(kind, {})
        for kind in _LISTED:
            found[kind] |= {entry["name"]: entry for entry in table.get(kind, ())}
    return deepcopy(found)


def write_changed(path: Path, catalogue: Iterable[Path], change: Change) -> tuple[Path, ...]:
    """Apply a change to a catalogue's entries and write the changed ones; return the catalogue's files and the new one.

    Args:
        path: of the new file, which gets the changed entries.
        catalogue: files in addition to the shipped ones.
        change: changes entries.
    """
    catalogue = tuple(catalogue)
    before, after = tables_of(catalogue), tables_of(catalogue)
    change(after)
    new = {
        kind: {name: entry for name, entry in entries.items() if entry != before[kind].get(name)}
        for kind, entries in after.items()
    }
    content: dict[str, Any] = {"format": FORMAT}
    content |= {kind: list(new[kind].values()) for kind in _LISTED if new[kind]}
    content |= {kind: new[kind] for kind in _BY_NAME if new[kind]}
    path.write_text(to_toml(content), encoding="utf-8")
    return (*catalogue, path)
