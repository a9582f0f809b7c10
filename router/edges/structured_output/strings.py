"""Strings of an output: plain words, and values of JSON Schema's formats."""

from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from uuid import UUID

from lorrery.router.edges.structured_output.budget import Budget, DeadEndError
from lorrery.tokenizer.file import WORDS

_MOST_WORDS = 3


@cache
def _words() -> list[str]:
    return WORDS.read_text(encoding="utf-8").split()


def word(rng: Random) -> str:
    """Return one word; each is a token in the usual vocabularies, behind a space."""
    return rng.choice(_words())


def phrase(rng: Random, budget: Budget, least: int = 0, most: int | None = None) -> str:
    """Return a few words in `least` to `most` characters; None: no upper bound.

    Raises:
        DeadEndError: there is no such length.
        UnmetError: it is too long.
    """
    if most is not None and most < least:
        raise DeadEndError(
            f"asks for a string of {least} characters or more, and {most} at most; change one of the two"
        )
    budget.take_characters(least)
    text = " ".join(word(rng) for _ in range(rng.randint(1, _MOST_WORDS)))
    while len(text) < least:
        text += f" {word(rng)}"
    if most is not None and len(text) > most:
        text = text[:most]
        if text.endswith(" "):
            text = f"{text[:-1]}s"
    budget.take_characters(max(0, len(text) - least))
    return text


def _date(rng: Random) -> str:
    return f"20{rng.randint(20, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _time(rng: Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}Z"


def _local(rng: Random, least: int) -> str:
    """Return words with dots between them, `least` characters or more."""
    text = word(rng)
    while len(text) < least:
        text += f".{word(rng)}"
    return text


def _email(rng: Random, least: int) -> str:
    return f"{_local(rng, least - 12)}@example.com"


def _host(rng: Random, least: int) -> str:
    return f"{_local(rng, least - 12)}.example.com"


def _uri(rng: Random, least: int) -> str:
    return f"https://example.com/{_local(rng, least - 20)}"


FORMATS: Mapping[str, Callable[[Random, int], str]] = {
    "date-time": lambda rng, _: f"{_date(rng)}T{_time(rng)}",
    "date": lambda rng, _: _date(rng),
    "time": lambda rng, _: _time(rng),
    "duration": lambda rng, _: f"PT{rng.randint(1, 59)}M",
    "email": _email,
    "idn-email": _email,
    "hostname": _host,
    "idn-hostname": _host,
    "ipv4": lambda rng, _: f"192.0.2.{rng.randint(1, 254)}",
    "ipv6": lambda rng, _: f"2001:db8::{rng.randint(1, 0xFFFF):x}",
    "uri": _uri,
    "iri": _uri,
    "uri-reference": _uri,
    "iri-reference": _uri,
    "uuid": lambda rng, _: str(UUID(int=rng.getrandbits(128), version=4)),
    "json-pointer": lambda rng, _: f"/{word(rng)}",
    "regex": lambda rng, _: f"{word(rng)}+",
}
"""By name; each takes the fewest characters that are wanted, which not every one can give. Other formats say nothing.
Names and addresses are those reserved for examples (RFC 2606, 5737)."""
