"""Expresses a plan's settings as command-line options, so that `lorrery plan` can print the run behind a figure."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.settings.cluster import Settings, load
from lorrery.service.settings.reading import key_of, override_of
from lorrery.simulator.plan.plan import Sizing
from lorrery.worker.device.capacity import Workload


@dataclass(frozen=True, slots=True)
class Cluster:
    """Settings as given on the command line.

    Attributes:
        config: settings file.
        overrides: `KEY=VALUE`; later ones win.
    """

    config: Path
    overrides: tuple[str, ...] = ()

    def but(self, **values: str | int | None) -> "Cluster":
        """Return a copy with settings changed; `__` in a name stands for a dot, None leaves a setting unchanged."""
        changes = (override_of(name.replace("__", "."), value) for name, value in values.items() if value is not None)
        return replace(self, overrides=(*self.overrides, *changes))

    def alone(self) -> "Cluster":
        """Return a copy with one worker per process, so that the number of processes is the number of workers."""
        return self if self.settings().worker.gpus == 1 else self.but(worker__gpus=1)

    def unscaled(self) -> "Cluster":
        """Return a copy without an autoscaler; settings of its rule would be refused as without effect."""
        others = (override for override in self.overrides if not f"{key_of(override)}.".startswith("autoscaler."))
        found = replace(self, overrides=tuple(others))
        return found.but(autoscaler__enabled=False) if found.settings().is_autoscaled else found

    def changed(self, changes: Mapping[str, object]) -> "Cluster":
        """Return a copy with settings changed."""
        texts = (f"{key}={json.dumps(value)}" for key, value in changes.items())
        return replace(self, overrides=(*self.overrides, *texts))

    def settings(self) -> Settings:
        """Read the settings.

        Raises:
            SettingsError: as `service.settings.reading.load`.
        """
        return load(self.config, self.overrides)

    def arguments(self) -> list[str]:
        """Return the options that give these settings."""
        config = [] if self.config == DEFAULT_SETTINGS else ["--config", str(self.config)]
        return [*config, *(part for override in self.overrides for part in ("--set", override))]


def command_of(cluster: Cluster, work: Workload, rate: float, sizing: Sizing) -> str:
    """Return the `lorrery simulate` command that repeats the decisive trial; the cluster has the plan's adapters."""
    arguments = [
        *cluster.unscaled().arguments(), "--rate", _number(rate), "--input-range", str(work.prompt_tokens),
        "--output-range", str(work.output_tokens), "-n", str(sizing.num_requests),
    ]  # fmt: skip
    if work.num_adapters:
        arguments += ["--num-adapters", str(work.num_adapters), "--adapter-exponent", "0"]
    arguments += ["--workers", str(sizing.num_replicas or sizing.trials[-1].num_replicas)]
    return f"lorrery simulate {shlex.join(arguments)}"


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
