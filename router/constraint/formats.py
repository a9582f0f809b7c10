"""Draws strings of JSON Schema's formats."""

from collections.abc import Callable, Mapping
from random import Random
from uuid import UUID

from lorrery.router.constraint.words import word


def _date(rng: Random) -> str:
    return f"20{rng.randint(20, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _time(rng: Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}Z"


def _email(rng: Random) -> str:
    return f"{word(rng)}@example.com"


def _host(rng: Random) -> str:
    return f"{word(rng)}.example.com"


def _uri(rng: Random) -> str:
    return f"https://example.com/{word(rng)}"


FORMATS: Mapping[str, Callable[[Random], str]] = {
    "date-time": lambda rng: f"{_date(rng)}T{_time(rng)}",
    "date": _date,
    "time": _time,
    "duration": lambda rng: f"PT{rng.randint(1, 59)}M",
    "email": _email,
    "idn-email": _email,
    "hostname": _host,
    "idn-hostname": _host,
    "ipv4": lambda rng: f"192.0.2.{rng.randint(1, 254)}",
    "ipv6": lambda rng: f"2001:db8::{rng.randint(1, 0xFFFF):x}",
    "uri": _uri,
    "iri": _uri,
    "uri-reference": _uri,
    "iri-reference": _uri,
    "uuid": lambda rng: str(UUID(int=rng.getrandbits(128), version=4)),
    "json-pointer": lambda rng: f"/{word(rng)}",
    "regex": lambda rng: f"{word(rng)}+",
}
"""By name; other formats say nothing. Names and addresses are those reserved for examples (RFC 2606, 5737)."""
