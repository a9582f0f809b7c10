"""The settings of a cluster: one TOML file, read by every service and command.

Names follow S-LoRA (`max_total_token_num`, `batch_max_tokens`, `running_max_req_size`, `max_req_input_len`,
`max_req_total_len`) and vLLM (`max_num_seqs`, `max_num_batched_tokens`, `max_loras`, `block_size`). Each section is
defined by its owner: `scheduler/settings.py`, `worker/settings.py`, `router/settings.py`, and
`service/settings/sections.py` for those that every process reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from lorrery.router.settings import RouterSettings
from lorrery.scheduler.settings import AdapterSettings, SchedulerSettings
from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import Fault, check_faults, parse_fault
from lorrery.service.names import gpu_names
from lorrery.service.settings import reading as reading
from lorrery.service.settings.autoscaler import AutoscalerSettings
from lorrery.service.settings.groups import check_groups, rule_of, set_in_vain, with_its_group
from lorrery.service.settings.presets import Served, preset_tables
from lorrery.service.settings.reading import FileSettings
from lorrery.service.settings.sections import (
    HostPattern,
    LogSettings,
    MetricsSettings,
    Name,
    PathOrNone,
    TlsSettings,
    TracingSettings,
)
from lorrery.worker.settings import WorkerGroup, WorkerSettings

MAX_WORKERS = 100_000
"""Upper bound on a cluster's workers: a simulation of more would exhaust a machine's memory before it started."""
FORMAT = 1
"""Version of the settings file's format."""


class Settings(FileSettings):
    """A whole cluster. Read it with `load`."""

    format: int = Field(default=FORMAT, description="version of this file's format")
    model: str = Field(
        default="Llama-2-7B", description="base model of the whole cluster, by its name in the catalogue"
    )
    engine: Name | None = Field(
        default=None,
        description="inference engine whose defaults apply: vllm, sglang or trtllm, or a version such as vllm-0.24;"
        " sets batching, memory, limits, host time and kernels (docs/engines.md); individual settings take precedence;"
        " unset: none",
    )
    catalogue: tuple[Path, ...] = Field(default=(), description="TOML files with additional GPUs, models and engines")
    time_scale: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] = Field(
        default=1.0, description="wall seconds per device second; 2 = everything takes twice as long"
    )
    faults: tuple[str, ...] = Field(
        default=(), description="scheduled faults, such as 'slow_worker,at=30,worker=worker-0,factor=2'"
    )
    cluster_token: PathOrNone = Field(
        default=None,
        description="file of the token with which routers and workers authenticate to schedulers, reread when it"
        " changes; unset: no token is required",
    )
    allowed_hosts: tuple[HostPattern, ...] = Field(
        default=(),
        description="names under which metrics, the page, and an HTTP edge without keys and TLS may be called, beside"
        " addresses, localhost and the host they listen on; `*`, `?` and `[...]` as in a shell (docs/security.md)",
    )
    adapters: AdapterSettings = AdapterSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    worker: WorkerSettings = WorkerSettings()
    workers: tuple[WorkerGroup, ...] = Field(
        default=(),
        description="groups of workers with different GPUs; unset: all workers are as in [worker], as many as are"
        " started",
    )
    autoscaler: AutoscalerSettings = AutoscalerSettings()
    router: RouterSettings = RouterSettings()
    server_tls: TlsSettings = TlsSettings()
    client_tls: TlsSettings = TlsSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()

    @classmethod
    def preset(
        cls, layer: Mapping[str, Any], given: Mapping[str, Any], later: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        """Return the preset of the engine that a layer names.

        Raises:
            SettingsError: no such engine, or one that needs more information about GPU or model.
        """
        name = layer.get("engine")
        if not isinstance(name, str):
            return "", {}
        served = Served(
            gpu=_gpu_of(given),
            model=str(given.get("model", cls.model_fields["model"].default)),
            catalogue=tuple(map(Path, given.get("catalogue", ()))),
            adapter_rank=_largest_rank(given.get("adapters")),
        )
        return f"engine = {name!r}", preset_tables(name, served, later)

    @classmethod
    def without_effect(cls, layers: Sequence[Mapping[str, Any]]) -> str | None:
        """Return which setting of `[worker]` or `[autoscaler]` in a later source has no effect; None: none."""
        return set_in_vain(layers)

    @model_validator(mode="before")
    @classmethod
    def _takes_its_group(cls, content: Any) -> Any:  # noqa: ANN401  pydantic's
        """Apply the settings of the group that the worker belongs to, if any."""
        return with_its_group(content) if isinstance(content, dict) else content

    @model_validator(mode="after")
    def _groups_can_be(self) -> Self:
        if self.worker.group is None:
            check_groups(self.workers, self.worker, self.autoscaler)
            self._check_numbers()
        return self

    def _check_numbers(self) -> None:
        gpus = (int(group.overrides.get("gpus", self.worker.gpus)) * group.count for group in self.workers)
        if (count := sum(gpus)) > MAX_WORKERS:
            raise ValueError(
                f"workers: the groups have {count} workers; at most {MAX_WORKERS} are allowed; lower a count"
            )

    @model_validator(mode="after")
    def _known_format(self) -> Self:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known; this version reads format {FORMAT}")
        return self

    @model_validator(mode="after")
    def _heartbeats_are_heard(self) -> Self:
        every, within = self.worker.heartbeat_seconds, self.scheduler.worker_timeout_seconds
        if 2 * every > within:
            raise ValueError(
                f"worker.heartbeat_seconds ({every:g}) must be at most half of scheduler.worker_timeout_seconds"
                f" ({within:g}): healthy workers would be lost"
            )
        return self

    @model_validator(mode="after")
    def _places_are_left(self) -> Self:
        pinned, places = len(set(self.scheduler.sglang.pinned_loras)), self.adapters.max_loras
        if places is not None and pinned >= places:
            raise ValueError(
                f"scheduler.sglang.pinned_loras has {pinned} adapters, and adapters.max_loras is {places}: leave at"
                " least one place for the base model and the others"
            )
        return self

    @model_validator(mode="after")
    def _kv_events_have_blocks(self) -> Self:
        kind = self.scheduler.prefix_cache.kind
        if self.worker.kv_events.endpoint is not None and kind not in ("blocks", "radix"):
            raise ValueError(
                f"worker.kv_events.endpoint is set; a prefix cache of kind {kind!r} has no blocks to report: set"
                " scheduler.prefix_cache.kind = 'blocks', or leave the endpoint unset"
            )
        return self

    @model_validator(mode="after")
    def _possible_faults(self) -> Self:
        try:
            faults = self.planned_faults()
            # Only the program that runs the workers knows whether a lost worker is replaced, and may be lost again.
            check_faults(faults, adapters=self.adapters_of(faults), replaced=True)
        except SettingsError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _no_adapter_is_the_model(self) -> Self:
        if same := self.adapters.listed(self.model_names):
            raise ValueError(f"adapters.registry: adapter {same[0]!r} has the base model's name; give it another id")
        return self

    @model_validator(mode="after")
    def _weights_have_adapters(self) -> Self:
        if self.scheduler.fair_by == "tenant" and isinstance(self.scheduler.fair_weights, tuple):
            if self.scheduler.fair_weights:
                raise ValueError(
                    "scheduler.fair_weights: with fair_by = 'tenant', weights are given by tenant: {a = 2}"
                )
            return self
        num_weights, num_adapters = len(self.scheduler.fair_weights), self.adapters.num_adapters
        if isinstance(self.scheduler.fair_weights, tuple) and num_weights > num_adapters:
            raise ValueError(
                f"scheduler.fair_weights has {num_weights} weights; the registry has {num_adapters} adapters"
            )
        return self

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """Names of the base model for clients; responses carry the first."""
        return self.router.served_model_names or (self.model,)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the base model; no adapter may have one of them."""
        return self.model, *self.served_model_names

    @property
    def http_tls(self) -> TlsSettings:
        """TLS of the router's HTTP edge."""
        return self.server_tls if self.http_tls_section == "server_tls" else self.router.http_tls

    @property
    def http_tls_section(self) -> str:
        """The section that `http_tls` comes from."""
        return "server_tls" if self.router.http_tls == TlsSettings() else "router.http_tls"

    def num_worker_processes(self, asked: int | None, default: int | None = None) -> int:
        """Return the number of worker processes.

        Args:
            asked: number requested by the caller; None: none.
            default: used if neither the caller nor the settings give a number; None: 2, or 1 if an engine is named or a
                process has several GPUs.

        Raises:
            SettingsError: both give a number and they differ, or there are too many workers.
        """
        if not self.workers:
            if asked is None:
                asked = default or (2 if self.engine is None and self.worker.gpus == 1 else 1)
            if asked * self.worker.gpus > MAX_WORKERS:
                raise SettingsError(
                    f"{asked} worker processes of {self.worker.gpus} GPUs are asked for; a cluster has at most"
                    f" {MAX_WORKERS} workers; ask for fewer"
                )
            return asked
        count = sum(group.count for group in self.workers)
        if asked not in (None, count):
            raise SettingsError(
                f"{asked} workers are asked for, and the settings have {len(self.workers)} groups of [[workers]] with"
                f" {count} in all; leave the number out, or change the groups' count (--set 'workers=[]': no groups)"
            )
        return count

    def groups_of_processes(self, count: int) -> list[int | None]:
        """Return the group of each of `count` worker processes, in order; None: there are no groups."""
        if not self.workers:
            return [None] * count
        return [number for number, group in enumerate(self.workers) for _ in range(group.count)]

    def workers_of_processes(self, count: int) -> dict[str, tuple[str, ...]]:
        """Return the names of `count` worker processes, in order, each with the names of its workers."""
        gpus = [kind.worker.gpus for kind, number in self._processes(count) for _ in range(number)]
        return {name: gpu_names(name, gpus[index]) for index, name in enumerate(f"worker-{n}" for n in range(count))}

    def worker_names(self, count: int) -> list[str]:
        """Return the names of all workers of `count` processes, in the order of `kinds`."""
        return [name for names in self.workers_of_processes(count).values() for name in names]

    def kinds(self, count: int) -> list[tuple["Settings", int]]:
        """Return the settings of each kind of worker, and the number of workers of that kind in `count` processes."""
        return [(kind, number * kind.worker.gpus) for kind, number in self._processes(count)]

    def for_group(self, number: int) -> "Settings":
        """Return the settings for the workers of a group of `[[workers]]`."""
        return changed(self, {"worker.group": number})

    @property
    def is_autoscaled(self) -> bool:
        """Whether a rule scales the cluster's workers, or those of some group."""
        if self.worker.group is not None:
            return changed(self, {"worker.group": None}).is_autoscaled
        if not self.workers:
            return self.autoscaler.enabled
        return any(rule_of(group, self.autoscaler).enabled for group in self.workers)

    def _processes(self, count: int) -> list[tuple["Settings", int]]:
        if not self.workers:
            return [(self, count)]
        return [(self.for_group(number), group.count) for number, group in enumerate(self.workers)]

    def of_gpu(self, gpu: str) -> "Settings":
        """Return the settings for a worker with another GPU, on which an engine's preset depends.

        A GPU that is not in these settings' catalogue gets the settings of `[worker]`'s GPU.
        """
        if self.engine is None or gpu == self.worker.gpu:
            return self
        if gpu not in self._of_gpus:
            try:
                found = changed(self, {"workers": [], "worker.group": None, "worker.gpu": gpu})
            except SettingsError:
                found = self
            self._of_gpus[gpu] = found
        return self._of_gpus[gpu]

    @cached_property
    def _of_gpus(self) -> dict[str, "Settings"]:
        return {}

    def planned_faults(self) -> tuple[Fault, ...]:
        """Return the scheduled faults."""
        return tuple(map(parse_fault, self.faults))

    def adapters_of(self, faults: Iterable[Fault]) -> list[str]:
        """Return the initial adapters that faults name."""
        return self.adapters.listed({fault.adapter for fault in faults})

    def fair_weights(self) -> dict[str, Fraction]:
        """Return the fair weights by adapter; decimal fractions are taken exactly."""
        weights = self.scheduler.fair_weights
        by_adapter = (
            weights.items()
            if isinstance(weights, dict)
            else zip((name for name, _ in self.adapters.expand()), weights, strict=False)
        )
        return {name: Fraction(str(weight)) for name, weight in by_adapter}


def _largest_rank(adapters: object) -> int:
    """Return the largest rank in a registry as it was given, valid or not; 0: there is none."""
    registry = adapters.get("registry") if isinstance(adapters, Mapping) else None
    given = registry if isinstance(registry, (list, tuple)) else ()
    ranks = [spec.get("rank") for spec in given if isinstance(spec, Mapping)]
    return max([rank for rank in ranks if isinstance(rank, int)], default=0)


def _gpu_of(tables: Mapping[str, Any]) -> str:
    """Return the GPU that a settings file's tables name.

    If the worker belongs to a group, the group's GPU; if every group names its own, that of the first group.
    """
    worker, groups = tables.get("worker"), tables.get("workers")
    own = worker if isinstance(worker, Mapping) else {}
    number = str(own.get("group", ""))
    known = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list | tuple) else []
    if number.isdecimal() and int(number) < len(known):
        own = {**own, **known[int(number)]}
    elif known and all("gpu" in group for group in known):  # then no worker has the GPU of [worker]
        own = known[0]
    return str(own.get("gpu", WorkerSettings().gpu))


def load(path: Path | None = None, overrides: Iterable[str] = ()) -> Settings:
    """Read the settings.

    Args:
        path: TOML file; unset: `LORRERY_CONFIG`, and if that is unset too, defaults only.
        overrides: `section.key=value` strings; the value is TOML, or a bare string.

    Raises:
        SettingsError: a file cannot be read, or a key, format or value is invalid; names the file, the environment or
        `--set` as the origin.
    """
    return reading.load(Settings, path, overrides)


def changed(content: Settings | Mapping[str, Any], overrides: Mapping[str, object] | Iterable[str] = ()) -> Settings:
    """Return settings with some values changed; reads neither the file nor the environment.

    Args:
        content: settings, or the tables of a settings file; missing values take defaults.
        overrides: `{"section.key": value}`, or strings as for `load`.

    Raises:
        SettingsError: an unknown key or an invalid value; names the key.
    """
    return reading.changed(Settings, content, overrides)


def origins(path: Path | None = None, overrides: Iterable[str] = ()) -> dict[reading.Key, str]:
    """Map each setting that is not a default to its origin: the engine's preset, the file, and so on.

    Args:
        path: as for `load`.
        overrides: as for `load`.

    Raises:
        SettingsError: as `load`.
    """
    settings = load(path, overrides)
    found = reading.origins(Settings, path, overrides)
    number = settings.worker.group
    if number is not None:
        group = settings.workers[number]
        own = {"worker": group.overrides, "autoscaler": group.autoscaler}
        found |= {key: f"workers.{number}" for key, _ in reading.leaves(own)}
    return found
