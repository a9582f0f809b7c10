"""The causes that contribute to a served run's times, each of which can be left out: `validate serving --without`.

A cause is left out in the catalogue (a constant reset to its neutral value), by a setting, or in the source's clients.
The rest is the model's prediction before it had that cause.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorrery.service.errors import SettingsError
from lorrery.validation.changed_catalogue import Change, Tables, write_changed
from lorrery.validation.serving_run import CLIENT_TIME, DRAWN_LENGTHS, MESSAGES, Options

ALL = "all"
"""For `--without`: each cause by itself."""
_HOST = ("launch_ms", "step_ms", "sequence_ms", "prefill_ms", "prefill_token_ms")
_FACTORS = ("gemm_factor", "prefill_factor", "decode_factor", "fp8_decode_factor", "all_reduce_factor")


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause.

    Attributes:
        left_out: the model's assumption without it.
        change: to the catalogue; None: it is not in the catalogue.
        overrides: settings that leave it out.
        of_clients: whether it is left out in the source's clients, under its name.
    """

    left_out: str
    change: Change | None = None
    overrides: tuple[str, ...] = ()
    of_clients: bool = False


def _engines(names: Iterable[str], value: object) -> Change:
    def change(tables: Tables) -> None:
        for engine in tables["engines"].values():
            engine |= {name: value for name in names if name in engine}

    return change


def _older_kernels(tables: Tables) -> None:
    for engine in tables["engines"].values():
        engine.pop("kernels", None)


def _vendors_all_reduce(tables: Tables) -> None:
    for gpu in tables["gpu"].values():
        gpu.pop("modern_all_reduce", None)


def _one_degree(tables: Tables) -> None:
    for link in tables["links"].values():
        link.pop("us_per_gpu", None)
        if isinstance(by_degree := link["gb_per_second"], Mapping):
            link["gb_per_second"] = by_degree[min(by_degree, key=int)]


def _kernels(part: str, changes: Mapping[str, Any]) -> Change:
    """Change constants of one kind of kernel in all fits that have them."""

    def change(tables: Tables) -> None:
        for fit in tables["fits"].values():
            for constants in fit.get(part, {}).values():
                constants |= {name: value for name, value in changes.items() if name in constants}

    return change


def _sixteen_bits(tables: Tables) -> None:
    for fit in tables["fits"].values():
        for part in ("gemm", "attention"):
            fit[part] = {name: constants for name, constants in fit.get(part, {}).items() if name == "bf16"}


def _no_norms(tables: Tables) -> None:
    for model in tables["model"].values():
        model.pop("query_key_norms", None)


CAUSES: Mapping[str, Cause] = {
    "host-time": Cause("the CPU takes no time", _engines(_HOST, 0.0)),
    "engine-factors": Cause("the engine's kernels are those that were timed", _engines(_FACTORS, 1.0)),
    "todays-kernels": Cause("kernels and all-reduces of older engines", _older_kernels),
    "graph-all-reduce": Cause("NCCL sums over GPUs", _vendors_all_reduce),
    "all-reduce-degree": Cause("one bandwidth and start for any number of GPUs", _one_degree),
    "prefill-form": Cause(
        "prefill attention without tiles of its own, their start, and the store",
        _kernels("attention", {"overlap": 0.0, "tile": 64, "tile_start": 100.0, "store_bandwidth": 0.0}),
    ),
    "decode-sequences": Cause(
        "decode attention reads the cache and no more", _kernels("attention", {"sequence_ns": 0.0, "longest_ns": 0.0})
    ),
    "inner-blocks": Cause("products without the time of a block's inner elements", _kernels("gemm", {"inner_ns": 0.0})),
    "types": Cause("8 bits have the constants of 16", _sixteen_bits),
    "query-key-norms": Cause("no norms of queries and keys", _no_norms),
    "reported-memory": Cause("memory is the label's", _engines(["memory"], "label")),
    "expert-padding": Cause(
        "experts' rows are not padded, and none takes time",
        _kernels("moe", {"expert_rows": 0.0, "expert_us": 0.0}),
    ),
    "expert-imbalance": Cause("tokens use experts alike", overrides=("worker.expert_distribution=balanced",)),
    CLIENT_TIME: Cause("prompts take no time outside of the engine (prompt_token_ms 0)", of_clients=True),
    DRAWN_LENGTHS: Cause("every prompt and output has the longest length", of_clients=True),
    MESSAGES: Cause("each token is a message of its own (stream_interval 1)", of_clients=True),
}
"""Name -> cause, in display order."""


def named(names: Iterable[str]) -> list[str]:
    """Return the causes of `--without`, without duplicates; `all`: all of them.

    Raises:
        SettingsError: unknown cause; names the known ones.
    """
    wanted = list(names)
    if unknown := [name for name in wanted if name != ALL and name not in CAUSES]:
        raise SettingsError(f"--without {', '.join(unknown)}: no such cause; there are {', '.join([*CAUSES, ALL])}")
    return list(CAUSES) if ALL in wanted else list(dict.fromkeys(wanted))


def without(name: str, options: Options, folder: Path) -> Options:
    """Return options that leave a cause out; `folder`: for a changed catalogue."""
    cause = CAUSES[name]
    if cause.change is not None:
        catalogue = write_changed(folder / f"without-{name}.toml", options.catalogue, cause.change)
        options = replace(options, catalogue=catalogue)
    if cause.of_clients:
        options = replace(options, without=options.without | {name})
    return replace(options, overrides=(*options.overrides, *cause.overrides))
