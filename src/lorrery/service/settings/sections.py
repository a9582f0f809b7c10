"""Building blocks of settings sections, and the sections that every process reads.

Every duration is in seconds. If its description says *device seconds*, `time_scale` stretches it; all others are wall
time.
"""

import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from lorrery.service.errors import SettingsError
from lorrery.service.names import why_no_name
from lorrery.service.network.targets import parse_name

KINDS: Mapping[object, str] = {int: "whole number", float: "number"}
_BOUNDS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))

_WHOLE = 1000
"""Bounds of at least this are shown with all their digits."""
MAX_PORT = 65_535
LONGEST_SECONDS = 1_000_000.0
"""Upper bound on times in the settings: 11 days, so that sums of several stay below `vocabulary.units.NEVER`."""
SHORTEST_SECONDS = 0.001
"""Lower bound on the interval of repeated work; with less a process would do nothing else."""
MAX_COUNT = 2**31 - 1
"""Upper bound on counts in the settings: what gRPC, ZeroMQ and the protocols' 32-bit fields can hold."""
MAX_SEED = 2**64 - 1
MAX_ADAPTERS = 1_000_000
"""Upper bound on an adapter family in the registry: every process holds all of it in memory."""
MAX_LOAD = 1_000_000.0
"""Upper bound on a finite load limit, in multiples of the mean; a larger one would have no effect either."""


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise ValueError(f"HOST:PORT expected, with a port of at most {MAX_PORT}, got {text!r}")
    return text


def checked_address(option: str, text: str) -> str:
    """Check and return an address given by an option.

    Raises:
        SettingsError: it is not HOST:PORT.
    """
    try:
        return _address(text)
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from None


Address = Annotated[str, AfterValidator(_address), Field(description="HOST:PORT; port 0 takes a free one")]


def _target(text: str) -> str:
    return text if parse_name(text) is not None else _address(text)


Target = Annotated[str, AfterValidator(_target), Field(description="HOST:PORT, or dns:///NAME:PORT")]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_SECONDS, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS, allow_inf_nan=False)]
Interval = Annotated[float, Field(ge=SHORTEST_SECONDS, le=LONGEST_SECONDS, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


def _host(pattern: str) -> str:
    if not pattern or set(pattern) & set("/:@ "):
        raise ValueError(f"a name or a pattern of names expected, without scheme and port, got {pattern!r}")
    return pattern


HostPattern = Annotated[str, AfterValidator(_host)]
AddressOrNone = Annotated[Address | None, BeforeValidator(lambda address: address or None)]
PathOrNone = Annotated[Path | None, BeforeValidator(lambda path: path or None)]
Weight = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]


def _load_limit(times: float) -> float:
    if MAX_LOAD < times < inf:
        raise ValueError(f"expected at most {MAX_LOAD:,.0f}, or inf for no limit, got {times:g}")
    return times


LoadLimit = Annotated[float, Field(gt=1), AfterValidator(_load_limit)]


def _name(text: str) -> str:
    why = why_no_name(text)
    if why is not None:
        raise ValueError(why)
    return text


Name = Annotated[str, AfterValidator(_name)]


def named(*names: str, plug_ins: bool = False) -> AfterValidator:
    """Accept these names, and with `plug_ins` also the dotted name (`module:Class`) of a class outside the tree."""

    def check(name: str) -> str:
        if name not in names and not (plug_ins and ":" in name):
            nor = ", nor a dotted name, module:Class" if plug_ins else ""
            raise ValueError(f"{name!r} is none of {', '.join(names)}{nor}")
        return name

    return AfterValidator(check)


def flat(metadata: Sequence[Any]) -> list[Any]:
    """Return an annotation's metadata, with that of nested fields."""
    return [one for entry in metadata for one in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def number_in_words(kind: object, metadata: Sequence[Any]) -> str:
    """Describe the numbers that an annotation accepts: `whole number at least 1`."""
    found = (
        f"{words} {_shown(getattr(one, attribute))}"
        for one in flat(metadata)
        for bound, attribute, words in _BOUNDS
        if isinstance(one, bound)
    )
    return f"{KINDS[kind]} {' and '.join(found)}".rstrip()


def _shown(bound: float) -> str:
    return f"{int(bound):,}" if bound >= _WHOLE and bound == int(bound) else f"{bound:g}"


def _refuse_booleans(model: type[BaseModel], name: str, value: object) -> None:
    """Check that a numeric field gets no boolean, also not in a list or a table.

    Raises:
        ValueError: it does; the message says which number is expected.
    """
    expected = _expected(model, name)
    if expected is None:
        return
    found = next(_booleans(value), None)
    if found is not None:
        shown = str(bool(found)).lower()
        raise ValueError(f"expected a {expected}, got {shown}, a boolean; write the number itself")


@cache
def _expected(model: type[BaseModel], name: str) -> str | None:
    field = model.model_fields[name]
    return _number(field.annotation, field.metadata)


def _number(kind: Any, metadata: Sequence[Any]) -> str | None:  # noqa: ANN401  any annotation
    """Describe the number that an annotation accepts, directly or in a list or table; None: none, or booleans too."""
    if kind in KINDS:
        return number_in_words(kind, metadata)
    arguments = get_args(kind)
    if annotations := getattr(kind, "__metadata__", ()):
        return _number(arguments[0], annotations)
    if bool in arguments or Any in arguments or get_origin(kind) is Literal:
        return None
    is_union = get_origin(kind) in (Union, types.UnionType)
    found = (_number(one, metadata if is_union else ()) for one in arguments)
    return next((one for one in found if one is not None), None)


def _booleans(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _booleans(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _booleans(one)
    elif isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")):
        yield value


class Table(BaseModel):
    """A table of the settings file that does not change. Numbers may be text, as in the environment, never booleans."""

    model_config = ConfigDict(frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_is_a_number(cls, value: object, field: ValidationInfo) -> object:
        if field.field_name is not None:
            _refuse_booleans(cls, field.field_name, value)
        return value


class Section(Table):
    """A table with no other keys than its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TlsSettings(Section):
    """TLS of one side; empty paths mean plaintext. With `ca` set, a server requires client certificates."""

    cert: PathOrNone = Field(default=None, description="PEM file of the certificate")
    key: PathOrNone = Field(default=None, description="PEM file of its private key")
    ca: PathOrNone = Field(default=None, description="PEM file of the authorities that sign the peer's certificate")

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            missing = "cert" if self.cert is None else "key"
            raise ValueError(f"cert and key go together; {missing} is not set")
        return self


class LogSettings(Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest severity that is logged"
    )
    format: Literal["console", "json"] = Field(
        default="console", description="console: lines for people; json: one JSON object per line"
    )


class MetricsSettings(Section):
    """Metrics exported to Prometheus."""

    max_adapters: Count = Field(
        default=20,
        description="adapters that have series of their own, those with the most traffic; all others are counted as"
        " `other`",
    )
    max_tenants: Count = Field(default=20, description="tenants that have series of their own, likewise")
    vllm: bool = Field(
        default=True,
        description="also export vLLM's series, on each worker and on the HTTP edge; docs/gateways.md lists them",
    )
    sglang: bool = Field(default=False, description="also export SGLang's series, in the same places")


def _collector(text: str) -> str:
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        right = url.scheme in {"http", "https"} and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"http://HOST:PORT or https://HOST:PORT expected, got {text!r}")
    return text


CollectorOrNone = Annotated[
    Annotated[str, AfterValidator(_collector)] | None, BeforeValidator(lambda endpoint: endpoint or None)
]


class TracingSettings(Section):
    """Tracing of requests; see docs/monitoring.md."""

    endpoint: CollectorOrNone = Field(
        default=None,
        description="collector that receives spans as OTLP, such as 'http://localhost:4317'; unset: tracing is off,"
        " unless OTEL_EXPORTER_OTLP_ENDPOINT is set",
    )
    protocol: Literal["grpc", "http"] | None = Field(
        default=None,
        description="protocol of the collector; unset: http for port 4318 or an endpoint with a path, else grpc",
    )
    sampling_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of requests to trace, of those whose client made no sampling decision; unset: 1, unless"
        " OTEL_TRACES_SAMPLER says otherwise",
    )
    headers: dict[str, str] = Field(default={}, description="headers to send to the collector, such as a token")
    ca: PathOrNone = Field(
        default=None,
        description="PEM file of the authorities that sign the collector's certificate; unset: the system's"
        " well-known ones",
    )
    service_name: Name = Field(
        default="lorrery",
        description="prefix of the spans' `service.name`, which ends in `-router`, `-scheduler` or `-worker`",
    )
    max_queued_spans: Count = Field(default=4096, description="maximum spans queued in a process; more are dropped")
