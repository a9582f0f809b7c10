"""What a plan is asked for: the table of options of `lorrery.plan` and of the command `lorrery plan`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Annotated, Any

from lorrery.loadgen.option_texts import parse_drift, parse_range
from lorrery.loadgen.workload.request import MOST_TOKENS
from lorrery.service.errors import SettingsError
from lorrery.service.names import cut
from lorrery.service.options import Option
from lorrery.simulator.arguments import read_positive, read_table, read_whole, shown
from lorrery.simulator.options import Overrides, SettingsLike
from lorrery.simulator.plan.level import DEFAULT, Level, level_of, parse_level, read_level
from lorrery.worker.device.capacity import Workload

__all__ = ["FEWEST_REQUESTS", "SLO", "Axis", "Claim", "PlanOptions", "Range"]

FEWEST_REQUESTS = 100
"""Fewest requests of a trial, where the caller gives their number."""
_MOST_SEEDS = 100

Range = int | tuple[int, int]
"""One number, or the least and the most."""

SLO = Option(
    "Service level; repeatable: ttft, tpot or e2e with _mean or a percentile such as _p95, in seconds; goodput,"
    " the share of requests that keep all of these; tokens_per_second of all requests. Only what is named"
    " counts; default: ttft_p99=1, tpot_p99=0.05.",
    metavar="NAME=VALUE",
    names=("--slo",),
    parse=parse_level,
    read=read_level,
    repeatable=True,
    in_python="Service level: `{'ttft_p95': 1.0, 'goodput': 0.99}`, as for `--slo`.",
)
"""Option of every command that has a service level."""

Axis = tuple[str, tuple[str, ...]]
"""A setting, and the values to try, as after `--set KEY=`."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A seller's claim: TTFT in seconds for a prompt of `prompt_tokens`, and tokens per second."""

    prompt_tokens: int
    ttft: float
    tokens_per_second: float


def _numbers(option: str) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of N,N,..., which names the option."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise SettingsError(f"{option} {text}: expected whole numbers, as in 8,16,32") from None
        if min(numbers) < 1:
            raise SettingsError(f"{option} {text}: every number must be at least 1")
        return numbers

    return parse


def _parse_concurrency(text: str) -> tuple[int, ...] | None:
    return _numbers("--concurrency")(text) if text else None


def _read_range(least: int) -> Callable[[str, object], tuple[int, int]]:
    """Return a reader of one whole number or two, from `least` on."""

    def read(name: str, value: object) -> tuple[int, int]:
        low, high = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
        low, high = read_whole(name, low, least), read_whole(name, high, least)
        if low > high:
            raise SettingsError(f"{name} is {shown(value)}; the first number must not be above the second")
        return low, high

    return read


def _parse_claim(text: str) -> Claim | None:
    if not text:
        return None
    try:
        prompt_tokens, ttft, tokens_per_second = text.split(",")
        claim = Claim(int(prompt_tokens), float(ttft), float(tokens_per_second))
    except ValueError:
        raise SettingsError(f"--claim {text}: expected TOKENS,SECONDS,TOKENS/S, as in 3500,1,300") from None
    if not all(0 < number <= MOST_TOKENS for number in (claim.prompt_tokens, claim.ttft, claim.tokens_per_second)):
        raise SettingsError(f"--claim {text}: every number must be more than 0 and at most {MOST_TOKENS:,}")
    return claim


def _read_claim(name: str, claim: object) -> Claim:
    if not isinstance(claim, Claim):
        raise SettingsError(
            f"{name} is {shown(claim)}; it must be a lorrery.Claim(prompt_tokens, ttft, tokens_per_second)"
        )
    return Claim(
        read_whole(f"{name}.prompt_tokens", claim.prompt_tokens, 1),
        read_positive(f"{name}.ttft", claim.ttft),
        read_positive(f"{name}.tokens_per_second", claim.tokens_per_second),
    )


def _parse_axis(option: str, text: str) -> Axis:
    key, equals, values = text.partition("=")
    found = tuple(value.strip() for value in values.split(","))
    if not equals or not key.strip() or not all(found):
        raise SettingsError(f"{option} {cut(text)}: expected KEY=VALUE,VALUE, as in adapters.max_loras=8,16,32")
    return key.strip(), found


def _read_axes(name: str, given: object) -> tuple[Axis, ...]:
    if isinstance(given, tuple):
        return given
    found: list[Axis] = []
    for key, values in given.items() if isinstance(given, Mapping) else ((shown(given), ()),):
        if not isinstance(key, str) or isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise SettingsError(f"{name} is {shown(given)}; expected lists, such as {{'adapters.max_loras': [8, 16]}}")
        found.append((key, tuple(json.dumps(value) for value in values)))
    return tuple(found)


def _read_drift(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"{name} is {shown(value)}; expected text, as for `lorrery load --drift`")
    parse_drift(value)
    return value


def _range_of(text: str) -> object:
    return tuple(json.loads(text)) if text.startswith("[") else parse_range(text)


_OF_WORK: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "adapters": ("adapters", int),
    "rank": ("ranks", lambda text: (int(text),)),
    "adapter-exponent": ("adapter_exponent", float),
    "prompt": ("prompt_tokens", _range_of),
    "output": ("output_tokens", _range_of),
    "rate": ("rate", float),
    "drift": ("drift", str),
}
"""What a curve may be over beside settings: option -> its field, and how a value is read."""


@dataclass(frozen=True)
class PlanOptions:
    """The requests, the service level, and the load to serve within it."""

    settings: Annotated[
        SettingsLike,
        "Of the cluster, as for `simulate`; its worker and `model` are the deployment. Of several kinds of worker,"
        " `worker.group` names one by its group.",
    ] = None
    _: KW_ONLY
    prompt_tokens: Annotated[
        Range,
        Option(
            "Tokens per prompt, uniform between two numbers.",
            metavar="LOW[:HIGH]",
            names=("--prompt",),
            parse=parse_range,
            read=_read_range(1),
            in_python="Tokens per prompt: one number, or the least and the most, uniform between them.",
        ),
    ] = 1750
    output_tokens: Annotated[
        Range,
        Option(
            "Tokens per answer, likewise.", metavar="LOW[:HIGH]", names=("--output",), parse=parse_range,
            read=_read_range(2),
        ),
    ] = 500  # fmt: skip
    adapters: Annotated[int, Option("Number of adapters that requests name.", least=0)] = 0
    ranks: Annotated[
        Sequence[int],
        Option(
            "Ranks of the adapters, in turn; default: 16.",
            metavar="R,R,...",
            names=("--rank",),
            parse=_numbers("--rank"),
            least=1,
            in_python="Adapter i has rank `ranks[i % len(ranks)]`.",
        ),
    ] = (16,)
    adapter_exponent: Annotated[
        float, Option("Zipf exponent of the adapters' shares of the requests; 0: all alike.", metavar="S", least=0)
    ] = 0.0
    slo: Annotated[
        Mapping[str, float] | tuple[tuple[str, float], ...],
        SLO,
    ] = DEFAULT
    rate: Annotated[
        float | None,
        Option(
            "Find the cheapest cluster that serves this request rate within the level, by simulation.",
            metavar="REQ/S",
            above=0,
            least_typed=0.001,
        ),
    ] = None
    search: Annotated[
        Mapping[str, Sequence[object]] | tuple[Axis, ...],
        Option(
            "With --rate: values of a setting to try; repeatable. Unset: tensor_parallel 1, 2, 4, 8 and, with adapters,"
            " max_loras and placement, unless they are given.",
            metavar="KEY=V,V,...",
            parse=partial(_parse_axis, "--search"),
            read=_read_axes,
            repeatable=True,
            in_python="With a rate: setting -> values to try.",
        ),
    ] = ()
    curve: Annotated[
        Mapping[str, Sequence[object]] | tuple[Axis, ...],
        Option(
            "With --rate: the cheapest cluster for each value of a setting, or of adapters, rank, adapter-exponent,"
            " prompt, output, rate or drift.",
            metavar="KEY=V,V,...",
            parse=partial(_parse_axis, "--curve"),
            read=_read_axes,
            repeatable=True,
            in_python="With a rate: what to answer each value of, as for `--curve`: `{'adapters': [20, 60, 200]}`.",
        ),
    ] = ()
    drift: Annotated[
        str | None,
        Option(
            "With --rate: how the adapters' popularity changes, as for `lorrery load`: shift,every=60, or"
            " flash,at=60,for=30.",
            metavar="KIND,PART=...",
            parse=str,
            read=_read_drift,
        ),
    ] = None
    around: Annotated[
        bool, "With a rate: also simulate clusters for less and more money, and the answer under other loads."
    ] = False
    num_requests: Annotated[
        int | None,
        Option(
            "Requests per simulated run; default: 6 x rate x E2E, from 1,000 to 60,000.",
            metavar="N",
            names=("--requests",),
            least=FEWEST_REQUESTS,
        ),
    ] = None
    seeds: Annotated[
        int,
        Option("Runs with different arrivals that prove the answer.", metavar="N", least=1, most_typed=_MOST_SEEDS),
    ] = 3
    jobs: Annotated[
        int | None,
        Option(
            "With --rate: runs at a time; unset: all cores.",
            metavar="N",
            names=("--jobs", "-j"),
            least=1,
            in_python="With a rate: processes that run at a time; None: this one alone.",
        ),
    ] = None
    concurrency: Annotated[
        Sequence[int] | None,
        Option(
            "Concurrent streams; default: powers of two, and as many as fit.",
            metavar="N,N,...",
            parse=_parse_concurrency,
            least=1,
        ),
    ] = None
    max_concurrency: Annotated[
        int | None,
        Option("Maximum streams per replica; default: running_max_req_size or max_num_seqs.", metavar="N", least=1),
    ] = None
    claim: Annotated[
        Claim | None,
        Option(
            "Claimed performance to judge, such as 3500,1,300.",
            metavar="TOKENS,SECONDS,TOKENS/S",
            parse=_parse_claim,
            read=_read_claim,
            in_python="A seller's claim to check.",
        ),
    ] = None
    overrides: Annotated[Overrides, "Single settings, which override `settings`."] = ()

    @property
    def work(self) -> Workload:
        """The requests to serve; the options are checked."""
        assert isinstance(self.prompt_tokens, tuple)
        assert isinstance(self.output_tokens, tuple)
        return Workload(self.prompt_tokens, self.output_tokens, self.adapters, self.ranks, self.adapter_exponent)

    @property
    def level(self) -> Level:
        """The service level; the options are checked."""
        assert isinstance(self.slo, tuple)
        return level_of(self.slo or DEFAULT)

    def along_curve(self) -> Iterator[tuple[str, "PlanOptions"]]:
        """Yield each value of the curve, as text, and the options with it; the options are checked.

        Raises:
            SettingsError: a value that cannot be.
        """
        assert isinstance(self.curve, tuple)
        assert isinstance(self.search, tuple)
        (key, values), *more = self.curve
        if more:
            raise SettingsError(f"--curve {key} and {more[0][0]}: a curve is over one of them")
        own = replace(self, curve=())
        for value in values:
            if key in _OF_WORK:
                name, read = _OF_WORK[key]
                try:
                    changes: dict[str, Any] = {name: read(value)}
                except ValueError:
                    raise SettingsError(f"--curve {key}: {cut(value)} is not a number") from None
                yield value, read_table(replace(own, **changes))
            else:
                yield value, replace(own, search=(*(one for one in self.search if one[0] != key), (key, (value,))))

    @property
    def limits(self) -> Mapping[str, int]:
        """The settings that `max_concurrency` stands for."""
        most = self.max_concurrency
        return {} if most is None else {f"scheduler.{key}": most for key in ("running_max_req_size", "max_num_seqs")}
