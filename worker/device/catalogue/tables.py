"""GPUs, models and engines by name, built from tables that the caller has read.

A table has the content of a TOML file in the form of `data/*.toml`: `fits`, `links`, `engines` and `prices` by name,
lists `gpu` and `model`. Later tables add to earlier ones and replace entries of the same name. Names are compared
without case and punctuation, and a model's organisation and its `-hf`, `-chat`, `-instruct`, `-base` endings are
ignored: `meta-llama/Llama-3.3-70B-Instruct` is `Llama-3.1-70B` by one of its aliases.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from lorrery.vocabulary.files import repeated
from lorrery.worker.device.catalogue.architecture import Model
from lorrery.worker.device.catalogue.entries import (
    Table,
    build_engine,
    build_fit,
    build_gpu,
    build_link,
    build_model,
    build_prices,
    check_tables,
    names_in,
    shown,
)
from lorrery.worker.device.catalogue.hardware import AllReduce, CatalogueError, Gpu, KernelFit, Price
from lorrery.worker.device.deployment import Engine

FORMAT = 1
DEFAULT_FIT = "default"
DEFAULT_MODERN_FIT = "default-modern"
"""The kernels of a present-day engine on a GPU without a named fit."""
DEFAULT_LINK = "pcie-4"
PACKAGE = "lorrery.worker.device"
"""Package whose folder `data` holds the shipped tables."""

_ENDING = re.compile(r"(-(hf|chat|instruct|thinking|base|it|v\d[\d.]*|2[4-9]\d\d))+$", re.IGNORECASE)
"""What checkpoints of one architecture add to its name: what they were trained for, a version, year and month."""
_LINKS = ("all_reduce", "pair_all_reduce", "modern_all_reduce", "host_all_reduce")
_HOST_LINKS = ("pcie-4-a40", "pcie-5-host")
"""Through the CPUs, of GPUs on PCIe 4.0 and 5.0."""
_PCIE_5_GB = 40

_Record = TypeVar("_Record", Gpu, Model)


class Catalogue:
    """The known GPUs, models, engines and fits.

    Args:
        tables: (origin of a table, for messages; the table), earliest first.

    Raises:
        CatalogueError: a malformed table, or a reference to an unknown name; the message names the entry.
    """

    def __init__(self, tables: Iterable[tuple[str, Table]]) -> None:
        self._fits: dict[str, KernelFit] = {}
        self._fit_entries: dict[str, Table] = {}
        self._links: dict[str, AllReduce] = {}
        self._gpus: dict[str, Gpu] = {}
        self._models: dict[str, Model] = {}
        self._engines: dict[str, Engine] = {}
        self._not_modelled: dict[str, str] = {}
        self._prices: list[tuple[str, Price]] = []
        self._gpu_names: dict[str, str] = {}
        self._model_names: dict[str, str] = {}
        self.sources: dict[str, str] = {}
        """Entry -> source of its figures, for `gpu NAME`, `fit NAME`, `link NAME`, `model NAME`, `engine NAME`."""
        gpus: list[tuple[str, Table]] = []
        for where, table in tables:
            self._add(where, table)
            _check_names(where, table)
            gpus += [(where, entry) for entry in table.get("gpu", ())]
        # Last, so that a GPU gets the fit and the links of the latest table that has them.
        for where, entry in gpus:
            at = f"{where}: gpu {entry.get('name')!r}"
            gpu, aliases = self._gpu(entry, at), names_in(entry, "aliases", at)
            self._enter("gpu", self._gpus, self._gpu_names, _plain, gpu, aliases, entry)

    @property
    def gpus(self) -> Mapping[str, Gpu]:
        """Name -> GPU, in the tables' order."""
        return self._gpus

    @property
    def models(self) -> Mapping[str, Model]:
        """Name -> model, in the tables' order."""
        return self._models

    @property
    def engines(self) -> Mapping[str, Engine]:
        """Name -> engine, in the tables' order."""
        return self._engines

    @property
    def fits(self) -> Mapping[str, KernelFit]:
        """Name -> kernels."""
        return self._fits

    def gpu(self, name: str) -> Gpu:
        """Return the GPU of that name or alias.

        Raises:
            CatalogueError: unknown GPU; the message lists the known ones.
        """
        known = self._gpu_names.get(_plain(name))
        if known is None:
            near = _nearest(_plain(name), self._gpu_names)
            raise CatalogueError(f"GPU {shown(name)} is not known{near}; known: {', '.join(self._gpus)}")
        return self._gpus[known]

    def model(self, name: str) -> Model:
        """Return the model of that name or alias.

        Raises:
            CatalogueError: unknown model (the message lists the known ones), or one that no step-time model fits (it
                says why).
        """
        known = self._model_names.get(_plain_model(name)) or self._model_names.get(_plain(name))
        if known is None:
            if (why := self._not_modelled.get(_plain_model(name))) is not None:
                raise CatalogueError(f"model {name!r} is not modelled: {why}")
            near = _nearest(_plain_model(name), self._model_names)
            raise CatalogueError(f"model {shown(name)} is not known{near}; known: {', '.join(self._models)}")
        return self._models[known]

    def engine(self, name: str, gpu: Gpu | None = None) -> Engine:
        """Return the engine of that name, as measured on this GPU if it was.

        Raises:
            CatalogueError: unknown engine; the message lists the known ones.
        """
        for found_on in () if gpu is None else (gpu.name, gpu.fit_name, gpu.modern_fit_name):
            if f"{name}-{found_on}" in self._engines:
                return self._engines[f"{name}-{found_on}"]
        if name not in self._engines:
            raise CatalogueError(f"engine {shown(name)} is not known; known: {', '.join(self._engines)}")
        return self._engines[name]

    def price(self, gpu: str) -> Price | None:
        """Return what a GPU costs by the latest list that has its name, in one spelling or another; None: none has."""
        wanted = self.gpu(gpu).name
        latest = None
        for name, price in self._prices:
            if self._gpu_names.get(name) == wanted:
                latest = price
        return latest

    def _add(self, where: str, table: Table) -> None:
        if table.get("format") != FORMAT:
            raise CatalogueError(f"{where}: format {table.get('format')!r} is not known; this version reads {FORMAT}")
        if unknown := table.keys() - {"format", "fits", "links", "engines", "gpu", "model", "not_modelled", "prices"}:
            raise CatalogueError(f"{where}: {', '.join(sorted(unknown))} has no meaning here")
        check_tables(table, where)
        for name, own in table.get("fits", {}).items():
            at = f"{where}: fits.{name}"
            entry = self._fit_entries[name] = self._completed(own, at)
            self._fits[name] = build_fit(entry, at)
            self.sources[f"fit {name}"] = str(entry.get("source", ""))
        for name, entry in table.get("links", {}).items():
            self._links[name] = build_link(entry, f"{where}: links.{name}")
            self.sources[f"link {name}"] = str(entry.get("source", ""))
        for name, entry in table.get("engines", {}).items():
            self._engines[name] = build_engine(name, entry, f"{where}: engines.{name}")
            self.sources[f"engine {name}"] = str(entry.get("source", ""))
        for name, entry in table.get("prices", {}).items():
            prices = build_prices(entry, f"{where}: prices.{name}")
            self._prices += [(_plain(gpu), price) for gpu, price in prices.items()]
        for name, why in table.get("not_modelled", {}).items():
            self._not_modelled[_plain_model(name)] = str(why)
        for entry in table.get("model", ()):
            at = f"{where}: model {entry.get('name')!r}"
            model, aliases = build_model(entry, at), names_in(entry, "aliases", at)
            self._enter("model", self._models, self._model_names, _plain_model, model, aliases, entry)

    def _completed(self, entry: Table, at: str) -> Table:
        """Return a fit's entry with what it does not say itself from the fit that it is `like`."""
        if (like := entry.get("like")) is None:
            return entry
        if like not in self._fit_entries:
            raise CatalogueError(f"{at}: like {shown(like)} is not known; known: {', '.join(self._fit_entries)}")
        return _merged(self._fit_entries[like], {key: value for key, value in entry.items() if key != "like"})

    def _enter(
        self,
        kind: str,
        records: dict[str, _Record],
        names: dict[str, str],
        plain: Callable[[str], str],
        record: _Record,
        aliases: Iterable[str],
        entry: Table,
    ) -> None:
        records[record.name] = record
        self.sources[f"{kind} {record.name}"] = str(entry.get("source", ""))
        for alias in (record.name, *aliases):
            names[plain(alias)] = record.name

    def _usual_link(self, key: str, entry: Table) -> str | None:
        if key == "host_all_reduce":
            fast = entry.get("pcie_gb_per_second", 0) >= _PCIE_5_GB
            return next((name for name in (_HOST_LINKS[fast], DEFAULT_LINK) if name in self._links), None)
        return DEFAULT_LINK if key == "all_reduce" else None

    def _gpu(self, entry: Table, at: str) -> Gpu:
        fit_name = entry.get("fit", DEFAULT_FIT)
        modern_name = entry.get("modern_fit", fit_name if "fit" in entry else DEFAULT_MODERN_FIT)
        for key, name in (("fit", fit_name), ("modern_fit", modern_name)):
            if name not in self._fits:
                raise CatalogueError(f"{at}: {key} {name!r} is not known; known: {', '.join(self._fits)}")
        links: dict[str, AllReduce] = {}
        for key in _LINKS:
            link = entry.get(key, self._usual_link(key, entry))
            if link is not None and link not in self._links:
                raise CatalogueError(f"{at}: {key} {link!r} is not known; known: {', '.join(self._links)}")
            if link is not None:
                links[key] = self._links[link]
        figures = {key: value for key, value in entry.items() if key not in {"fit", "modern_fit", *_LINKS}}
        return build_gpu(
            figures,
            at,
            name=entry.get("name"),
            fit=self._fits[fit_name],
            fit_name=fit_name,
            modern_fit=self._fits[modern_name],
            modern_fit_name=modern_name,
            **links,
        )


def _merged(below: Table, above: Table) -> dict[str, Any]:
    """Return a table in which entries take precedence over others, tables within it likewise."""
    found = dict(below)
    for key, value in above.items():
        nested = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = _merged(found[key], value) if nested else value
    return found


def _check_names(where: str, table: Table) -> None:
    """Check that no file has two GPUs or models of one name; a later file may replace an earlier one's.

    Raises:
        CatalogueError: names the entry.
    """
    for kind in ("gpu", "model"):
        names = [str(entry.get("name")) for entry in table.get(kind, ())]
        if twice := repeated(names):
            raise CatalogueError(f"{where}: {kind} {twice} is there twice; keep one")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _plain_model(name: str) -> str:
    return _plain(_ENDING.sub("", name.rpartition("/")[2]))


def _nearest(plain: str, names: Mapping[str, str]) -> str:
    """Return a hint at the known name nearest to an unknown one; empty if none is near."""
    near = get_close_matches(plain, names, n=1)
    return f" (nearest: {names[near[0]]})" if near else ""
