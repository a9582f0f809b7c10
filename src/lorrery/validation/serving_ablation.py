"""The causes that contribute to a served run's times, each of which can be left out, and the effect of each.

The effect is the errors of served runs with a cause and without it (`validate serving --without`). A cause is left out
in the catalogue (a constant reset to its neutral value), by a setting, or in the source's clients. The rest is the
model's prediction before it had that cause.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lorrery.service.errors import SettingsError
from lorrery.validation.figures import Errors, percent
from lorrery.validation.serving import ServingComparison, ServingGroup, Watch, grouped, predict_all
from lorrery.validation.serving_rows import DOUBTFUL, OK
from lorrery.validation.serving_run import CLIENT_TIME, DRAWN_LENGTHS, MESSAGES, Change, Options, Tables, write_changed
from lorrery.view.terminal import FigureTable

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


@dataclass(frozen=True, slots=True)
class Ablated:
    """Rows without a cause.

    Attributes:
        cause: its name.
        before: a group's errors with it.
        after: its errors without it.
        num_changed: rows with a different prediction.
    """

    cause: str
    before: ServingGroup
    after: ServingGroup
    num_changed: int


def ablate(
    comparison: ServingComparison, causes: Sequence[str], group_by: Sequence[str], options: Options, *, jobs: int,
    watch: Watch = lambda found, total: found,
) -> list[Ablated]:  # fmt: skip
    """Simulate the rows of a comparison again without each cause.

    Args:
        comparison: with all causes.
        causes: names.
        group_by: columns.
        options: as for the comparison.
        jobs: processes.
        watch: as for `serving.compare`.

    Returns:
        For each cause each group in which it changes anything, and then all rows that count. Rows that cannot be
        simulated without it, or with it, are left out on both sides.
    """
    file, before = comparison.file, comparison.predictions
    rows = [i for i, one in enumerate(before) if not one.why and not file.rows[i].quality.startswith(DOUBTFUL)]
    with TemporaryDirectory() as folder:
        runs = [
            (file.rows[index], chosen)
            for cause in causes
            for chosen in [without(cause, options, Path(folder))]
            for index in rows
        ]
        found = predict_all(runs, jobs=jobs, watch=watch)
    ablated: list[Ablated] = []
    for number, cause in enumerate(causes):
        after = dict(zip(rows, found[number * len(rows) : (number + 1) * len(rows)], strict=True))
        both = [index for index, one in after.items() if not one.why]
        changed = {index for index in both if after[index] != before[index]}
        for columns in (group_by, ()):
            for members in grouped(file, both, columns):
                num_changed = len(changed.intersection(members.indices))
                if num_changed or (not columns and members.quality == OK):
                    ablated.append(Ablated(cause, members.errors(before), members.errors(after), num_changed))
    return ablated


def render(ablated: Sequence[Ablated], *, groups: bool) -> FigureTable:
    """Return them as a table; `groups`: include each group, not just all rows of a quality."""
    shown = [one for one in ablated if groups or not one.before.key]
    keys = list(dict.fromkeys(name for one in shown for name in one.before.key))
    table = FigureTable(first_to_go=("changed",))
    table.add_column("without", justify="left", wraps_at=12)
    for name in keys:
        table.add_column(name, justify="left", wraps_at=9)
    for name in ("rows", "changed", "TPOT MAPE %", "without it", "TTFT MAPE %", "without it "):
        table.add_column(name)
    table.add_column("", justify="left", wraps_at=8)
    for one in shown:
        names = [one.before.key.get(name, "") for name in keys]
        if keys and not one.before.key:
            names[0] = "all"
        table.add_row(
            one.cause, *names, f"{one.before.num_rows:,}", f"{one.num_changed:,}",
            *_figures(one.before.tpot, one.after.tpot), *_figures(one.before.ttft, one.after.ttft),
            "" if one.before.quality == OK else one.before.quality,
        )  # fmt: skip
    return table


def legend(causes: Sequence[str]) -> list[str]:
    """Describe what is left out under each name."""
    width = max(map(len, causes))
    return [f"{name:<{width}}  {CAUSES[name].left_out}" for name in causes]


def to_json(ablated: Sequence[Ablated]) -> list[dict[str, object]]:
    """Return them for JSON."""
    return [
        {
            "without": one.cause,
            "group": dict(one.before.key),
            "quality": one.before.quality,
            "rows": one.before.num_rows,
            "rows_changed": one.num_changed,
            "tpot_mape": one.before.tpot.mape,
            "tpot_mape_without": one.after.tpot.mape,
            "ttft_rows": one.before.ttft.num_rows,
            "ttft_mape": one.before.ttft.mape,
            "ttft_mape_without": one.after.ttft.mape,
        }
        for one in ablated
    ]


def _figures(before: Errors, after: Errors) -> tuple[str, str]:
    return percent(before.mape), percent(after.mape)
