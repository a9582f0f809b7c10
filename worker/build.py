"""Builds the mock GPU from settings: reads catalogues and profiles, and derives the device of a worker."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import FREEZE_WORKER, SLOW_WORKER
from lorrery.service.faults.rules import RuleSet
from lorrery.service.files.reading import open_csv
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.presets import catalogue_with
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.answers import Answers, Words
from lorrery.worker.device.catalogue.architecture import Model, precision
from lorrery.worker.device.catalogue.hardware import CatalogueError, Gpu
from lorrery.worker.device.catalogue.tables import Catalogue
from lorrery.worker.device.constant import StepConstants
from lorrery.worker.device.deployment import Deployment, Engine, MemoryUse, MoeBackend, profiled_gb
from lorrery.worker.device.fitted import Fitted
from lorrery.worker.device.lora import LoraKernels
from lorrery.worker.device.lora_kernels import graph_slots
from lorrery.worker.device.output import LengthModel, LlmMockLength, LognormalLength
from lorrery.worker.device.profile import ProfileError, ProfileRow, read_profile
from lorrery.worker.device.steps import EngineStep, StepLogError, read_steps
from lorrery.worker.device.steptime import STEP_TIME_MODELS, Pace, Spells, StepTimeModel, pace_of
from lorrery.worker.settings import OutputSettings

_MARLIN_DTYPES = ("mxfp4", "int4")
"""Weights of experts whose constants in Marlin's kernel are known."""


def read_catalogue(extra: Iterable[Path] = ()) -> Catalogue:
    """Read the shipped catalogue and further files, whose entries take precedence.

    Raises:
        SettingsError: a file cannot be read or has the wrong form.
    """
    try:
        return catalogue_with(tuple(extra))
    except CatalogueError as error:
        raise SettingsError(str(error)) from None


def read_profile_file(path: Path) -> list[ProfileRow]:
    """Read a CSV file of measured steps.

    Raises:
        SettingsError: the file cannot be read, or a row is invalid; the message names file and line.
    """
    with open_csv(path, SettingsError, ProfileError) as file:
        return read_profile(file)


def read_steps_file(path: Path) -> list[EngineStep]:
    """Read a CSV file of an engine's steps.

    Raises:
        SettingsError: the file cannot be read, or a row is invalid; the message names file and line.
    """
    with open_csv(path, SettingsError, StepLogError) as file:
        return read_steps(file)


def own_rows(
    rows: Iterable[ProfileRow], catalogue: Catalogue, gpu: Gpu, model: Model, tensor_parallel: int
) -> list[ProfileRow]:
    """Return the timed rows that match one deployment; a row without a GPU or model matches any."""

    def about(row: ProfileRow) -> bool:
        try:
            return (
                (not row.gpu or catalogue.gpu(row.gpu) == gpu)
                and (not row.model or catalogue.model(row.model).is_shaped_as(model))
                and row.tensor_parallel == tensor_parallel
            )
        except CatalogueError:
            return False

    return [row for row in rows if row.quality == "ok" and row.measured_ms is not None and about(row)]


def deployment_of(settings: Settings) -> Deployment:
    """Return the deployment of a worker with these settings.

    Raises:
        SettingsError: a file cannot be read, or names are unknown or incompatible.
    """
    worker = settings.worker
    catalogue = read_catalogue(settings.catalogue)
    try:
        gpu, model = catalogue.gpu(worker.gpu), catalogue.model(settings.model)
        engine = catalogue.engine(worker.engine, gpu)
        profile: list[ProfileRow] = []
        steps: list[EngineStep] = []
        if worker.profile is not None and worker.step_time == "fitted":
            steps = read_steps_file(worker.profile)
            _check_kinds(steps, f"{_at(settings, 'profile')} = {str(worker.profile)!r}")
        elif worker.profile is not None:
            profile = own_rows(read_profile_file(worker.profile), catalogue, gpu, model, worker.tensor_parallel)
        return Deployment(
            gpu,
            model,
            worker.tensor_parallel,
            precision(worker.weight_dtype, worker.kv_dtype, model),
            engine,
            _lora(settings),
            _memory(settings, engine, model),
            profile,
            steps,
            StepConstants(**worker.constant.model_dump()),
            worker.expert_groups,
            worker.expert_distribution,
            _moe_backend(settings),
            worker.enforce_eager,
            worker.api_server_count,
            worker.peer_to_peer,
        )
    except CatalogueError as error:
        raise SettingsError(f"{_at(settings, 'gpu', 'engine')}, model: {error}") from None


def _moe_backend(settings: Settings) -> MoeBackend:
    """Return whose kernels compute experts.

    Raises:
        SettingsError: Marlin's, with weights of a type in which its constants are not known.
    """
    worker = settings.worker
    if worker.moe_backend == "marlin" and worker.weight_dtype not in _MARLIN_DTYPES:
        raise SettingsError(
            f"{_at(settings, 'moe_backend')} = 'marlin' with weight_dtype = {worker.weight_dtype!r}: its constants are"
            f" known for {' and '.join(_MARLIN_DTYPES)}; leave it at 'auto'"
        )
    return worker.moe_backend


def _check_kinds(steps: Iterable[EngineStep], at: str) -> None:
    """Check that a step log has both kinds of steps, each of which is fitted separately."""
    kinds = {bool(step.prefill_tokens) for step in steps}
    for kind, what in ((False, "of decodes alone (prefill_tokens = 0)"), (True, "with prefill (prefill_tokens > 0)")):
        if kind not in kinds:
            raise SettingsError(f"{at}: has no step {what}; step_time = 'fitted' needs both kinds")


def _at(settings: Settings, *keys: str) -> str:
    """Return the full names of a worker's settings, in its group if it belongs to one."""
    group = settings.worker.group
    where = "worker" if group is None else f"workers.{group}"
    return ", ".join(f"{where}.{key}" for key in keys)


@dataclass(frozen=True, slots=True)
class Device:
    """A worker's device.

    Attributes:
        deployment: GPU, model and engine.
        pool_tokens: size of its KV pool.
        step_time: its step-time model.
        settings: the settings that it follows from, as the worker announces them.
        pace: summary of its step times, announced likewise.
    """

    deployment: Deployment
    pool_tokens: int
    step_time: StepTimeModel
    settings: Mapping[str, Any]
    pace: Pace

    @property
    def can_extrapolate(self) -> bool:
        """Whether its step times are fitted to rows of a limited range."""
        return isinstance(self.step_time, Fitted)

    @property
    def extrapolated(self) -> str:
        """Which steps so far were outside the measured range, in words; empty: none, or nothing was measured."""
        return beyond_profile(self.step_time)


def device_of(settings: Settings) -> Device:
    """Return the device of a worker with these settings.

    Raises:
        SettingsError: as `deployment_of`, or the model does not fit.
    """
    deployment = deployment_of(settings)
    try:
        step_time = step_time_of(settings, deployment)
        pace = pace_of(step_time)
        if isinstance(step_time, Fitted):
            step_time.forget()  # discard the queries that computing the pace has made
        return Device(deployment, deployment.kv_pool_tokens(), step_time, settings.worker.of_device, pace)
    except CatalogueError as error:
        raise SettingsError(f"{_at(settings, 'gpu', 'tensor_parallel')}, model: {error}") from None


def beyond_profile(step_time: StepTimeModel) -> str:
    """Return the queries of a model outside the rows that it was fitted to, in words; empty: none."""
    return step_time.beyond if isinstance(step_time, Fitted) else ""


def step_time_of(settings: Settings, deployment: Deployment) -> StepTimeModel:
    """Return the step-time model of a worker.

    Raises:
        SettingsError: a step log that cannot be fitted.
        CatalogueError: incompatible parallel degrees.
    """
    try:
        return STEP_TIME_MODELS[settings.worker.step_time](deployment)
    except CatalogueError as error:
        if settings.worker.step_time != "fitted":
            raise
        raise SettingsError(f"{_at(settings, 'profile')} = {str(settings.worker.profile)!r}: {error}") from None


def spells_of(sets: Iterable[RuleSet], name: str) -> Spells:
    """Return when faults make a worker slow or freeze it.

    Args:
        sets: sets of faults; each applies for a period, from whose start the times of its faults count.
        name: name of the worker.
    """
    slow: list[tuple[int, int, Fraction]] = []
    frozen: list[tuple[int, int]] = []
    for rule_set in sets:
        for fault in rule_set.faults:
            if not fault.concerns(name):
                continue
            begin_ps, end_ps = rule_set.from_ps + fault.at_ps, rule_set.until_ps
            if fault.until_ps < NEVER:
                end_ps = min(end_ps, rule_set.from_ps + fault.until_ps)
            if fault.kind == SLOW_WORKER:
                slow.append((begin_ps, end_ps, fault.factor))
            elif fault.kind == FREEZE_WORKER:
                frozen.append((begin_ps, end_ps))
    return Spells(slow, frozen)


def length_model_of(output: OutputSettings) -> LengthModel:
    """Return the model of where outputs end by themselves."""
    if output.length_model == "llm-mock":
        return LlmMockLength()
    return LognormalLength(output.length_median, output.length_sigma)


def answers_of(settings: Settings) -> Answers:
    """Return the output model of a worker with these settings.

    Raises:
        SettingsError: a file cannot be read, or the model is unknown.
    """
    output, path = settings.worker.output, settings.router.tokenizer
    words = None
    if path is not None and output.mode != "echo":
        from lorrery.tokenizer.file import FileTokenizer

        tokenizer = FileTokenizer(path)
        words = Words(np.array(tokenizer.word_ids, np.uint32), tokenizer.eos_id)
    try:
        model = read_catalogue(settings.catalogue).model(settings.model).name
    except CatalogueError as error:
        raise SettingsError(f"model: {error}") from None
    return Answers(model, length_model_of(output), output.mode, words)


def _memory(settings: Settings, engine: Engine, model: Model) -> MemoryUse:
    worker, scheduler = settings.worker, settings.scheduler
    own_gb = worker.activation_gb
    if own_gb == "profiled":
        own_gb = profiled_gb(model, worker.tensor_parallel, scheduler.step_tokens, scheduler.max_num_seqs)
    return MemoryUse(
        share=Fraction(str(worker.gpu_memory_utilization)),
        own_gb=own_gb,
        of_rest=engine.memory_share_of == "rest",
        reported=engine.memory == "reported",
    )


def _lora(settings: Settings) -> LoraKernels:
    lora, adapters, eager = settings.worker.lora, settings.adapters, settings.worker.enforce_eager
    padding = adapters.max_lora_rank if lora.padding == "max_lora_rank" else lora.padding
    decode_slots = prefill_slots = 0
    if lora.kernels == "segmented" and lora.graph_sequences is not None and not eager:
        decode_slots = lora.graph_sequences
        prefill_slots = graph_slots(settings.scheduler.step_tokens, adapters.max_loras or 0)
    return LoraKernels(
        adapters.target_modules,
        padding,
        lora.launch_us,
        lora.sharded,
        lora.kernels,
        adapters.max_loras,
        _place_rank(settings) if lora.kernels == "segmented" else 0,
        decode_slots,
        prefill_slots,
        lora.projections == "all-linear",
        _place_rank(settings) if adapters.are_reserved else 0,
        not eager,
    )


def _place_rank(settings: Settings) -> int:
    """Return the rank for which places are made: vLLM's `max_lora_rank`, otherwise the largest known from the start."""
    adapters = settings.adapters
    ranks = [spec.rank for spec in adapters.registry]
    return adapters.max_lora_rank if settings.worker.lora.padding == "max_lora_rank" or not ranks else max(ranks)
