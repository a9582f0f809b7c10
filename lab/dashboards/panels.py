"""Panels of a few kinds, each with a unit and a description: what it shows, and what to look for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import common, heatmap, stat, statetimeline, statushistory, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus as queries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as query_models

PROMETHEUS = models.DataSourceRef(type_val="prometheus", uid="prometheus")
RATE = "$__rate_interval"

SECONDS, RATIO, COUNT, BYTES = "s", "percentunit", "short", "bytes"
REQUESTS_PER_SECOND, PER_SECOND = "reqps", "cps"
TOKENS_PER_SECOND = "suffix: tokens/s"

Levels = Mapping[str, float]
"""Colour and the value from which it holds, ascending; green below."""


class Query(NamedTuple):
    """PromQL, and the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel and its size in Grafana's grid."""

    builder: Any
    width: int
    height: int


# ---- queries ---------------------------------------------------------------------------------------------------------


def rate(metric: str, by: str = "", match: str = "") -> str:
    """Return the sum of a counter's rate, by some labels."""
    return f"sum{_by(by)}(rate({metric}{_match(match)}[{RATE}]))"


def mean(metric: str, by: str = "", match: str = "") -> str:
    """Return the mean of a histogram's observations, which is exact."""
    return f"{rate(metric + '_sum', by, match)} / {rate(metric + '_count', by, match)}"


def quantile(q: float, metric: str, by: str = "", match: str = "") -> str:
    """Return a percentile, interpolated within a bucket."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(metric + '_bucket', labels, match)})"


def percentiles(metric: str, match: str = "", *, quantiles: Sequence[float] = (0.5, 0.9, 0.99)) -> list[Query]:
    """Return the mean and some percentiles."""
    found = [Query(mean(metric, match=match), "mean")]
    return found + [Query(quantile(q, metric, match=match), f"p{q * 100:g}") for q in quantiles]


def leaders(expr: str, label: str) -> list[Query]:
    """Return the ten largest series by a label, which is as many as a legend can hold, each named by it."""
    return [Query(f"topk(10, {expr})", f"{{{{{label}}}}}")]


def ratio(part: str, whole: str) -> str:
    """Return a quotient; it has no value where nothing happens, rather than a made-up 0."""
    return f"{part} / {whole}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def _match(match: str) -> str:
    return f"{{{match}}}" if match else ""


# ---- panels ----------------------------------------------------------------------------------------------------------


def number(
    title: str, look: str, expr: str, unit: str, levels: Levels | None = None, *, width: int = 4, legend: str = ""
) -> Panel:
    """Return a large number with the course behind it."""
    builder = _with_queries(stat.Panel(), title, look, unit, [Query(expr, legend)])
    builder.graph_mode(common_models.BigValueGraphMode.AREA).color_mode(common_models.BigValueColorMode.VALUE)
    builder.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)).no_value("no traffic")
    builder.thresholds(_thresholds(levels or {}))
    return Panel(builder, width, 4)


def lines(
    title: str,
    look: str,
    wanted: Sequence[Query],
    unit: str,
    levels: Levels | None = None,
    *,
    width: int = 8,
    stacked: bool = False,
    shares: bool = False,
    maximum: float | None = None,
    link: str = "",
) -> Panel:
    """Return curves over time.

    Args:
        title: of the panel.
        look: its description.
        wanted: what it shows.
        unit: of the vertical axis.
        levels: drawn as dashed lines.
        width: of 24 columns.
        stacked: one on the other.
        shares: stacked to 100 %.
        maximum: of the axis.
        link: label that opens the dashboard about it, one of `LINKS`.
    """
    builder = _with_queries(timeseries.Panel(), title, look, unit, wanted)
    builder.line_width(1).fill_opacity(60 if stacked or shares else 8).show_points(common_models.VisibilityMode.NEVER)
    builder.span_nulls(False).min(0)
    if maximum is not None:
        builder.max(maximum)
    if stacked or shares:
        mode = common_models.StackingMode.PERCENT if shares else common_models.StackingMode.NORMAL
        builder.stacking(common.StackingConfig().mode(mode).group("A"))
    if levels:
        builder.thresholds(_thresholds(levels))
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
        builder.thresholds_style(style)
    builder.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )
    builder.tooltip(
        common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(common_models.SortOrder.DESCENDING)
    )
    if link:
        builder.data_links([_link(link)])
    return Panel(builder, width, 8)


def heat(title: str, look: str, metric: str, unit: str, *, match: str = "", width: int = 12) -> Panel:
    """Return a histogram over time: a column for each moment, a row for each bucket, darker where more fell."""
    query = Query(f"sum by (le) (increase({metric}_bucket{_match(match)}[{RATE}]))", "{{le}}")
    builder = _with_queries(heatmap.Panel(), title, look, unit, [query], query_models.PromQueryFormat.HEATMAP)
    builder.calculate(False).cell_gap(1).show_legend().show_tooltip()
    builder.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(common_models.AxisPlacement.LEFT))
    builder.color(_heat_colours())
    return Panel(builder, width, 8)


def cells(
    title: str, look: str, wanted: Query, unit: str, levels: Levels, *, width: int = 24, height: int = 12
) -> Panel:
    """Return a row of coloured cells for each series."""
    builder = _with_queries(statushistory.Panel(), title, look, unit, [wanted])
    builder.row_height(0.9).show_value(common_models.VisibilityMode.NEVER).max_data_points(120)
    builder.color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    builder.thresholds(_thresholds(levels, lowest="super-light-blue"))
    return Panel(builder, width, height)


def states(title: str, look: str, wanted: Query, words: Mapping[int, tuple[str, str]], *, width: int = 24) -> Panel:
    """Return a band for each series, whose numbers are `words` with their colours."""
    builder = _with_queries(statetimeline.Panel(), title, look, COUNT, [wanted])
    options = {
        str(value): models.ValueMappingResult(text=word, color=colour, index=index)
        for index, (value, (word, colour)) in enumerate(words.items())
    }
    builder.mappings([models.ValueMap(options=options)]).show_value(common_models.VisibilityMode.AUTO)
    builder.color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS)).merge_values(True)
    return Panel(builder, width, 7)


def rows(
    title: str, look: str, wanted: Query, columns: Mapping[str, str], *, width: int = 12, height: int = 6
) -> Panel:
    """Return a table of the labels that series have now, under other titles."""
    builder = _with_queries(table.Panel(), title, look, COUNT, [wanted], query_models.PromQueryFormat.TABLE)
    builder.no_value("none")
    order = {name: index for index, name in enumerate(columns)}
    keep: dict[str, object] = {"include": {"names": list(columns)}}
    builder.with_transformation(models.DataTransformerConfig(id_val="filterFieldsByName", options=keep))
    builder.with_transformation(
        models.DataTransformerConfig(id_val="organize", options={"indexByName": order, "renameByName": dict(columns)})
    )
    return Panel(builder, width, height)


LINKS = {"worker": "workers", "adapter": "lora", "tenant": "tenants"}
"""Label of a series, and the dashboard that a click on it opens."""


def _link(label: str) -> builders.DashboardLink:
    url = f"/d/lorrery-{LINKS[label]}?var-{label}=${{__field.labels.{label}}}&${{__url_time_range}}"
    return builders.DashboardLink(f"{label} ${{__field.labels.{label}}}").url(url)


def _with_queries(
    builder: Any,  # noqa: ANN401  the builders of panels share methods, and no class
    title: str,
    look: str,
    unit: str,
    wanted: Sequence[Query],
    shape: query_models.PromQueryFormat = query_models.PromQueryFormat.TIME_SERIES,
) -> Any:  # noqa: ANN401
    builder.title(title).description(look).unit(unit).datasource(PROMETHEUS)
    for letter, query in zip("ABCDEFGHIJKLMNOP", wanted, strict=False):
        asked = queries.Dataquery().expr(query.expr).ref_id(letter).datasource(PROMETHEUS).format(shape)
        if query.legend:
            asked.legend_format(query.legend)
        if shape is query_models.PromQueryFormat.TABLE:
            asked.instant()
        else:
            asked.range()
        builder.with_target(asked)
    return builder


def _thresholds(levels: Levels, lowest: str = "green") -> builders.ThresholdsConfig:
    steps = [models.Threshold(value=None, color=lowest)]
    steps += [models.Threshold(value=value, color=colour) for colour, value in levels.items()]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _heat_colours() -> heatmap.HeatmapColorOptions:
    return (
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        .scheme("Blues")
        .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
        .reverse(False)
        .fill("dark-blue")
    )
