"""Engine presets: what `engine = "vllm"` sets, for the GPU and the model in the settings.

The values and their sources are in `data/presets.toml`. A preset ranks below the single settings of the layer (file,
environment, command line) that names it, and above the earlier layers.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import read_tables
from lorrery.service.settings.reading import merge, nested
from lorrery.worker.device.catalogue.hardware import CatalogueError, Gpu
from lorrery.worker.device.catalogue.tables import PACKAGE, Catalogue

FORMAT = 1
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""
_PACKAGE = "lorrery.service.settings"
_LENGTHS = ("max_req_input_len", "max_req_total_len")


@dataclass(frozen=True, slots=True)
class EnginePreset:
    """One version of an engine.

    Attributes:
        name: with its version, as in settings.
        title: display name of the engine.
        source: of the values.
        settings: that it sets, as a settings file's tables.
        unset: settings that it resets to their defaults, by dotted name.
        by_gpu: rows with GPU-dependent settings; the first that matches applies.
        without: settings that this version does not have yet, reset likewise, those of `by_gpu` too.
    """

    name: str
    title: str
    source: str
    settings: Mapping[str, Any]
    unset: tuple[str, ...] = ()
    by_gpu: tuple[Mapping[str, Any], ...] = field(default=())
    without: tuple[str, ...] = ()

    def tables(self, gpu: Gpu) -> dict[str, Any]:
        """Return the settings for a GPU; None stands for the default."""
        found: dict[str, Any] = {}
        for key in self.unset:
            merge(found, nested(key, None))
        merge(found, deepcopy(dict(self.settings)))
        row = next((row for row in self.by_gpu if _fits(row, gpu)), {})
        merge(found, deepcopy(row.get("settings", {})))
        for key in self.without:
            merge(found, nested(key, None))
        return found


@cache
def presets() -> Mapping[str, Mapping[str, EnginePreset]]:
    """Return engine -> version -> preset; the newest version is last."""
    found: dict[str, dict[str, EnginePreset]] = {}
    for where, table in read_tables(_PACKAGE):
        assert table.pop("format") == FORMAT, where
        for engine, entry in table.items():
            found[engine] = {}
            for version, own in entry["versions"].items():
                settings = deepcopy(entry["settings"])
                merge(settings, own.get("settings", {}))
                found[engine][version] = EnginePreset(
                    f"{engine}-{version}",
                    entry["title"],
                    own.get("source", entry["source"]),
                    settings,
                    tuple(entry["unset"]),
                    tuple(entry.get("by_gpu", ())),
                    tuple(own.get("without", ())),
                )
    return found


def preset(name: str) -> EnginePreset:
    """Return the preset of an engine, or of an engine and a version, of which a prefix of the numbers is matched.

    Raises:
        SettingsError: no such engine or version; the message lists the existing ones.
    """
    engine, _, version = name.partition("-")
    versions = presets().get(engine)
    if versions is None:
        raise SettingsError(
            f"engine: {name!r} is not known; known: {', '.join(presets())}, each with a version if need be, such as"
            f" {_versions('vllm')}"
        )
    if "-" not in name:
        return versions[list(versions)[-1]]
    lines = [known for known in versions if version == known or version.startswith(f"{known}.")]
    line = max(lines, key=len, default=None)  # of 0.5 and 0.5.23, the latter
    if line is None:
        raise SettingsError(f"engine: {name!r} is not known in that version; known: {_versions(engine)}")
    return versions[line]


def nearest(engine: str, version: str) -> EnginePreset:
    """Return the preset of an engine that is nearest to a version: the last one not above it, else the oldest.

    Without a number in `version`, the newest.

    Raises:
        SettingsError: no such engine; the message lists the existing ones.
    """
    newest = preset(engine)
    numbers = _numbers(version)
    if not numbers:
        return newest
    versions = presets()[engine]
    oldest = versions[next(iter(versions))]
    return next((own for known, own in reversed([*versions.items()]) if _numbers(known) <= numbers), oldest)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (0, 9, 1) of 0.9.1rc2."""
    return tuple(int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine serves.

    Attributes:
        gpu: by name.
        model: by name.
        catalogue: files with further entries.
        adapter_rank: the largest of the adapters known from the start; 0: there are none.
    """

    gpu: str
    model: str
    catalogue: tuple[Path, ...] = ()
    adapter_rank: int = 0


def preset_tables(name: str, served: Served, later: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine's preset sets, as the tables of a settings file.

    `max_lora_rank` is the engine's default, or as much more as the registry needs.

    Args:
        name: of the engine.
        served: GPU, model and adapters, on which some values depend.
        later: settings of the layer that names the preset, and of those above, which take precedence.

    Raises:
        SettingsError: no such engine, GPU or model, or the model's longest request is unknown.
    """
    chosen = preset(name)
    scheduler = later.get("scheduler", {})
    if not isinstance(scheduler, Mapping):
        scheduler = {}
    model = None
    try:
        catalogue = catalogue_with(served.catalogue)
        found = chosen.tables(catalogue.gpu(served.gpu))
        if any(key not in scheduler for key in _LENGTHS) or "vocab_size" not in later.get("router", {}):
            model = catalogue.model(served.model)
    except CatalogueError as error:
        raise SettingsError(f"worker.gpu, model: {error}") from None
    adapters = found["adapters"]
    if served.adapter_rank > adapters["max_lora_rank"]:
        adapters["max_lora_rank"] = next(
            (rank for rank in MAX_LORA_RANKS if rank >= served.adapter_rank), MAX_LORA_RANKS[-1]
        )
    if model is None:
        return found
    merge(found, {"router": {"vocab_size": model.vocabulary}})
    if all(key in scheduler for key in _LENGTHS):
        return found
    if model.max_model_len is None:
        missing = " and ".join(f"scheduler.{key}" for key in _LENGTHS if key not in scheduler)
        raise SettingsError(
            f"engine: {name!r} takes the longest request from the model, and the catalogue has no max_model_len of"
            f" {model.name}: add it there, or set {missing}"
        )
    longest = scheduler.get("max_req_total_len", model.max_model_len)
    pool = scheduler.get("max_total_token_num")
    if "max_req_total_len" not in scheduler and isinstance(pool, int):
        longest = min(longest, pool)
    merge(found, {"scheduler": {"max_req_total_len": longest}})
    if isinstance(longest, int):
        merge(found, {"scheduler": {"max_req_input_len": max(longest - 1, 1)}})
    return found


def catalogue_with(files: tuple[Path, ...] = ()) -> Catalogue:
    """Return the shipped catalogue with further files, made anew only if one of them has changed.

    Raises:
        CatalogueError: a file has the wrong form.
        SettingsError: a file cannot be read.
    """
    try:
        return _catalogue(files, tuple(path.read_bytes() for path in files))
    except OSError:
        return Catalogue(read_tables(PACKAGE, files))  # which says why


@lru_cache(maxsize=4)
def _catalogue(files: tuple[Path, ...], contents: tuple[bytes, ...]) -> Catalogue:
    del contents  # part of the key
    return Catalogue(read_tables(PACKAGE, files))


def _fits(row: Mapping[str, Any], gpu: Gpu) -> bool:
    return gpu.memory_gb >= row.get("min_memory_gb", 0) and not gpu.name.startswith(tuple(row.get("but_not", ())))


def _versions(engine: str) -> str:
    return ", ".join(one.name for one in presets()[engine].values())
