"""Builds records from a catalogue's entries, and checks every figure: known, present, of its type, within its range."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args

from lorrery.worker.device.catalogue.architecture import WEIGHT_DTYPES, Model
from lorrery.worker.device.catalogue.hardware import (
    ATTENTION_TYPES,
    MOE_TYPES,
    SIXTEEN,
    WEIGHT_TYPES,
    AllReduce,
    AttentionFit,
    Basis,
    CatalogueError,
    GemmFit,
    Gpu,
    KernelFit,
    LoraFit,
    MoeFit,
    Price,
    SegmentedLoraFit,
)
from lorrery.worker.device.deployment import Engine

Table = Mapping[str, Any]

_NOT_FIGURES = {"name", "aliases", "source", "published_billions"}
_BASES = get_args(Basis)
_FLAT = {
    "gemm_flops": ("gemm", "flops"),
    "gemm_bandwidth": ("gemm", "bandwidth"),
    "gemm_us": ("gemm", "us"),
    "gemm_tile": ("gemm", "tile"),
    "decode_bandwidth": ("attention", "decode_bandwidth"),
    "prefill_flops": ("attention", "prefill_flops"),
    "attention_us": ("attention", "decode_us", "prefill_us"),
}
"""Constants that a fit may give for all types at once -> (the table of types, the constants in it)."""
_DIVISORS = {
    "flops", "bandwidth", "elementwise_bandwidth", "decode_bandwidth", "prefill_flops", "gb_per_second", "tflops",
    "fp8_tflops", "fp4_tflops", "pcie_gb_per_second", "activation_bandwidth", "prefill_lora_flops", "memory_gb",
    "usable_memory_gb", "watts",
}  # fmt: skip
"""Figures that may not be less than `_LEAST`."""
_LEAST, _LARGEST, _MOST_COUNT = 0.001, 1e6, 100_000_000
"""Bounds of divisors, of all figures, and of counts: far beyond what exists, with step times still finite."""
_MOST = {"overlap": 16.0, "request_ms": 60_000.0, "request_token_ms": 10.0}
"""Upper limits of single figures: a power with this exponent is still finite, and so is a sum of these times."""
_LABEL = 1.1
"""A device may report more than its label says by the difference between GiB and GB, 7 %."""
_MOST_SHOWN = 100  # characters of a value in a message
_FIT_WORDS = {"source", "basis", "gpus", "assumed"}
_ENGINE_CHOICES = {
    "attention": ("split", "unified"),
    "kernels": ("older", "modern"),
    "fp8_experts": ("fp8", "fp8_block"),
    "memory": ("label", "reported"),
    "memory_share_of": ("all", "rest"),
}

_Record = TypeVar(
    "_Record", KernelFit, GemmFit, AttentionFit, MoeFit, LoraFit, SegmentedLoraFit, AllReduce, Gpu, Model, Engine
)


def build(record: type[_Record], entry: Table, at: str, **given: Any) -> _Record:  # noqa: ANN401  a field's type
    """Build a record from an entry.

    Args:
        record: a dataclass.
        entry: its figures; descriptive keys such as `source` are ignored.
        at: where the entry is, for messages.
        given: fields that are not in the entry, taken unchecked.

    Raises:
        CatalogueError: an unknown, missing or invalid figure.
    """
    figures = {key: value for key, value in entry.items() if key not in _NOT_FIGURES}
    known = {field.name: field for field in fields(record)}
    if unknown := figures.keys() - known.keys():
        raise CatalogueError(f"{at}: {', '.join(sorted(unknown))} has no meaning here")
    values = {**figures, **given}
    for name, field in known.items():
        if name not in values:
            if field.default is MISSING:
                raise CatalogueError(f"{at}: {name} is missing")
            continue
        rule = _rule(name, field.type, values[name], is_figure=name in figures)
        if rule:
            raise CatalogueError(f"{at}: {name} cannot be {shown(values[name])}; it must be {rule}")
    return record(**values)


def build_model(entry: Table, at: str) -> Model:
    """Build a model, and check that its shapes agree.

    Raises:
        CatalogueError: as `build`.
    """
    model = build(Model, entry, at, name=entry.get("name"))
    if model.num_heads % model.num_kv_heads:
        raise CatalogueError(
            f"{at}: num_kv_heads cannot be {model.num_kv_heads}; it must divide num_heads, {model.num_heads}"
        )
    if model.experts_per_token > model.num_experts:
        raise CatalogueError(
            f"{at}: experts_per_token cannot be {model.experts_per_token}; it must be at most num_experts,"
            f" {model.num_experts}"
        )
    if model.checkpoint not in WEIGHT_DTYPES:
        raise CatalogueError(
            f"{at}: checkpoint cannot be {shown(model.checkpoint)}; it must be one of {', '.join(WEIGHT_DTYPES)}"
        )
    if model.window_layers > model.num_layers or bool(model.window_layers) != bool(model.window):
        raise CatalogueError(
            f"{at}: window_layers is {model.window_layers} and window {model.window}; give both or neither, and at most"
            f" num_layers, {model.num_layers}, layers"
        )
    return model


def build_gpu(entry: Table, at: str, **given: object) -> Gpu:
    """Build a GPU; `given`: its name, fits and links.

    Raises:
        CatalogueError: as `build`.
    """
    gpu = build(Gpu, entry, at, **given)
    if gpu.usable_memory_gb is not None and gpu.usable_memory_gb > _LABEL * gpu.memory_gb:
        raise CatalogueError(
            f"{at}: usable_memory_gb cannot be {gpu.usable_memory_gb:g}; it must be at most {_LABEL:g} x memory_gb,"
            f" {_LABEL * gpu.memory_gb:g}"
        )
    return gpu


def build_prices(entry: Table, at: str) -> dict[str, Price]:
    """Build the prices of a list, by GPU.

    Raises:
        CatalogueError: something else is in it, or a price that cannot be.
    """
    source, date, prices = (entry.get(key) for key in ("source", "date", "usd_per_hour"))
    if entry.keys() - {"source", "date", "usd_per_hour"} or not isinstance(prices, Mapping):
        raise CatalogueError(f"{at}: a list has source, date and a table usd_per_hour by GPU")
    if not isinstance(source, str) or not isinstance(date, str):
        raise CatalogueError(f'{at}: source and date must be texts, such as "our contract" and "2026-11-28"')
    for name, value in prices.items():
        if rule := _rule("usd_per_hour", float, value, is_figure=True):
            raise CatalogueError(f"{at}: usd_per_hour.{name} cannot be {shown(value)}; it must be {rule}")
    return {name: Price(float(value), source, date) for name, value in prices.items()}


def names_in(entry: Table, key: str, at: str) -> tuple[str, ...]:
    """Return the names that an entry lists; empty if it lists none.

    Raises:
        CatalogueError: not a list of names.
    """
    names = entry.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CatalogueError(f"{at}: {key} cannot be {shown(names)}; it must be a list of names")
    return tuple(names)


def check_tables(table: Table, where: str) -> None:
    """Check that the parts of a table are lists of entries, or entries by name.

    Raises:
        CatalogueError: one is not.
    """
    for key in ("gpu", "model"):
        entries = table.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            raise CatalogueError(f"{where}: {key} cannot be {shown(entries)}; entries begin with [[{key}]]")
    for key in ("fits", "links", "engines", "not_modelled", "prices"):
        named = table.get(key, {})
        if not isinstance(named, Mapping):
            raise CatalogueError(f"{where}: {key} cannot be {shown(named)}; it must be a table")
        for name, entry in () if key == "not_modelled" else named.items():
            if not isinstance(entry, Mapping):
                raise CatalogueError(f"{where}: {key}.{name} cannot be {shown(entry)}; it must be a table")


def shown(value: object) -> str:
    """Return a value as text for a message, cut if long."""
    if isinstance(value, str) and len(value) > _MOST_SHOWN:
        return f"{value[:_MOST_SHOWN]!r}..."
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _rule(name: str, kind: object, value: object, *, is_figure: bool) -> str:
    """Return the rule for a field that a value breaks; empty if it is valid."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool or kind is str:
        return "" if isinstance(value, kind) else {bool: "true or false", str: "text"}[kind]
    if kind is int or (kind == int | None and value is not None):
        right = number and isinstance(value, int) and 0 < value <= _MOST_COUNT
        return "" if right else f"a whole number from 1 to {_MOST_COUNT:,}"
    if is_figure and kind in (float, float | None):
        least, most = _LEAST if name in _DIVISORS else 0.0, _MOST.get(name, _LARGEST)
        right = isinstance(value, int | float) and number and least <= value <= most
        return "" if right else f"a number from {least:g} to {most:,.0f}"
    return ""


def build_fit(entry: Table, at: str) -> KernelFit:
    """Build a fit: `gemm.TYPE` and `attention.TYPE` are tables, or their constants are given for all types at once.

    `moe.TYPE`, `lora` and `lora_segmented` are tables, which may be missing.

    Raises:
        CatalogueError: as `build`.
    """
    figures = {key: value for key, value in entry.items() if key not in _FIT_WORDS}
    tables: dict[str, dict[str, dict[str, Any]]] = {"gemm": {}, "attention": {}, "moe": {}}
    flat: dict[str, dict[str, Any]] = {"gemm": {}, "attention": {}, "moe": {}}
    for key in figures.keys() & _FLAT.keys():
        part, *constants = _FLAT[key]
        flat[part].update(dict.fromkeys(constants, figures.pop(key)))
    for part, types in (("gemm", WEIGHT_TYPES), ("attention", ATTENTION_TYPES), ("moe", MOE_TYPES)):
        given = figures.pop(part, {})
        if not isinstance(given, Mapping):
            raise CatalogueError(f"{at}: {part} cannot be {given!r}")
        if unknown := given.keys() - set(types):
            listed = ", ".join(sorted(unknown))
            raise CatalogueError(f"{at}.{part}: {listed} has no meaning here; types: {', '.join(types)}")
        for name, constants in given.items():
            if not isinstance(constants, Mapping):
                raise CatalogueError(f"{at}.{part}: {name} cannot be {constants!r}; its constants are a table")
            tables[part][name] = {**flat[part], **constants}
        if SIXTEEN not in tables[part] and part != "moe":
            _all_there(flat[part], part, at)
            tables[part][SIXTEEN] = flat[part]
    lora, segmented = (figures.pop(key, None) for key in ("lora", "lora_segmented"))
    for key, table in (("lora", lora), ("lora_segmented", segmented)):
        if table is not None and not isinstance(table, Mapping):
            raise CatalogueError(f"{at}: {key} cannot be {shown(table)}; its constants are a table")
    return build(
        KernelFit,
        figures,
        at,
        lora=None if lora is None else build(LoraFit, lora, f"{at}.lora"),
        lora_segmented=None if segmented is None else build(SegmentedLoraFit, segmented, f"{at}.lora_segmented"),
        gemm={name: build(GemmFit, table, f"{at}.gemm.{name}") for name, table in tables["gemm"].items()},
        attention={
            name: build(AttentionFit, table, f"{at}.attention.{name}") for name, table in tables["attention"].items()
        },
        moe={name: build(MoeFit, table, f"{at}.moe.{name}") for name, table in tables["moe"].items()},
        basis=_basis(entry, at),
        source=str(entry.get("source", "")),
        gpus=names_in(entry, "gpus", at),
        assumed=names_in(entry, "assumed", at),
    )


def build_link(entry: Table, at: str) -> AllReduce:
    """Build a link; `gb_per_second` is a figure, or a table of figures by number of GPUs.

    `degrees`, the measured numbers of GPUs, are those of that table unless listed.

    Raises:
        CatalogueError: as `build`.
    """
    figures = {key: value for key, value in entry.items() if key not in {"basis", "gpus", "degrees"}}
    by_degree: dict[int, float] = {}
    if isinstance(table := figures.get("gb_per_second"), Mapping):
        for degree, value in table.items():
            rule = _rule("gb_per_second", float, value, is_figure=True)
            if rule or not str(degree).isdecimal():
                rule = rule or "named by a number of GPUs"
                raise CatalogueError(f"{at}: gb_per_second.{degree} cannot be {shown(value)}; it must be {rule}")
            by_degree[int(degree)] = float(value)
        if not by_degree:
            raise CatalogueError(f"{at}: gb_per_second is missing")
        figures["gb_per_second"] = by_degree[min(by_degree)]
    return build(
        AllReduce,
        figures,
        at,
        by_degree=tuple(sorted(by_degree.items())),
        basis=_basis(entry, at),
        source=str(entry.get("source", "")),
        gpus=names_in(entry, "gpus", at),
        degrees=_degrees(entry, at) or tuple(sorted(by_degree)),
    )


def build_engine(name: str, entry: Table, at: str) -> Engine:
    """Build an engine.

    Raises:
        CatalogueError: as `build`.
    """
    figures = {key: value for key, value in entry.items() if key not in {"source", "basis", "gpus"}}
    source, gpus = str(entry.get("source", "")), names_in(entry, "gpus", at)
    engine = build(Engine, figures, at, name=name, basis=_basis(entry, at), source=source, gpus=gpus)
    for key, choices in _ENGINE_CHOICES.items():
        if (value := getattr(engine, key)) not in choices:
            raise CatalogueError(f"{at}: {key} is {value!r}; it may be {' or '.join(map(repr, choices))}")
    return engine


def _degrees(entry: Table, at: str) -> tuple[int, ...]:
    degrees = entry.get("degrees", [])
    if not isinstance(degrees, list) or any(_rule("degrees", int, degree, is_figure=True) for degree in degrees):
        raise CatalogueError(f"{at}: degrees cannot be {shown(degrees)}; it must be a list of numbers of GPUs")
    return tuple(sorted(degrees))


def _all_there(flat: Table, part: str, at: str) -> None:
    """Check that constants given for all types at once are complete; the message has their names in the table."""
    for key, (of, constant, *_) in _FLAT.items():
        if of == part and constant != "tile" and constant not in flat:
            raise CatalogueError(f"{at}: {key} is missing")


def _basis(entry: Table, at: str) -> Basis:
    basis = entry.get("basis", "fitted")
    if basis not in _BASES:
        raise CatalogueError(f"{at}: basis is {basis!r}; it may be {', '.join(_BASES)}")
    return basis  # type: ignore[no-any-return]
