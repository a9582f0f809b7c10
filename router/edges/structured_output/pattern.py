"""Draws texts: plain words, values of JSON Schema's formats, and those that a regular expression matches as a whole.

The expression is read by Python's own parser and never run, so one that takes for ever to match costs no more than any
other. Lookarounds, word boundaries and conditional groups are refused: what they allow depends on the rest of the text.
"""

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from random import Random
from typing import Any
from uuid import UUID

from lorrery.router.edges.structured_output.budget import MAX_CHARACTERS, Budget, DeadEndError, UnmetError
from lorrery.tokenizer.file import WORDS

MAX_PATTERN_CHARACTERS = 4096
_MORE_REPEATS = 3
"""Repetitions beyond the fewest, where no length is asked for."""
_TRIES = 64
_STEPS_OF_A_NODE = 5

Nodes = Iterable[tuple[Any, Any]]
"""Kinds, and what they are of."""

_PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]
_OTHERS = "éßΩя中あ한😀"
_CATEGORIES: Mapping[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    sre.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    sre.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
}
_REFUSED: Mapping[Any, str] = {
    sre.ASSERT: "a lookahead or lookbehind",
    sre.ASSERT_NOT: "a lookahead or lookbehind",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive quantifier",
    sre.GROUPREF_EXISTS: "a conditional group",
}
_BEGINNINGS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
_ENDS = (*_BEGINNINGS, sre.AT_END, sre.AT_END_STRING)


class _Parsed:
    """A pattern.

    Attributes:
        nodes: of its syntax tree.
        letters: characters of its classes, by the identity of a class in the tree; filled as they are needed.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.letters: dict[int, list[str]] = {}


def draw(pattern: str, rng: Random, budget: Budget, least: int = 0, most: int | None = None) -> str:
    """Return a text of `least` to `most` characters that `pattern` matches from beginning to end.

    Raises:
        DeadEndError: none was found; it is no regular expression, is too long, or uses what is not supported.
        UnmetError: it asks for too much.
    """
    parsed, more, failed = _parsed(pattern), _MORE_REPEATS, None
    for _ in range(_TRIES):
        text = _Text(parsed, rng, budget, more)
        try:
            text.add(parsed.nodes)
        except DeadEndError as error:  # an alternative of several, perhaps
            failed = error
            continue
        drawn = "".join(text.pieces)
        if len(drawn) < least:
            more = min(2 * more + 1, 4 * least)
        elif most is not None and len(drawn) > most:
            more //= 2
        else:
            budget.take_characters(len(drawn))
            return drawn
    raise failed or DeadEndError("has a pattern for which no string of its length was found; allow other lengths")


@lru_cache(maxsize=64)
def _parsed(pattern: str) -> _Parsed:
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise DeadEndError(
            f"has a pattern of {len(pattern)} characters; it may have {MAX_PATTERN_CHARACTERS}; give a shorter one"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Parsed(sre_parser.parse(pattern))
    except re.error as error:
        raise DeadEndError(f"has a pattern that is no regular expression: {error}; correct it") from None
    except (OverflowError, RecursionError) as error:
        raise DeadEndError(f"has a pattern that cannot be read: {error}; give a simpler one") from None


class _Text:
    """A text that grows as its pattern is read.

    Args:
        parsed: the pattern.
        rng: the source of all choices.
        budget: is charged for the work.
        more: repetitions beyond the fewest, at most.

    Attributes:
        pieces: of the text.
    """

    def __init__(self, parsed: _Parsed, rng: Random, budget: Budget, more: int) -> None:
        self.pieces: list[str] = []
        self._parsed = parsed
        self._more = more
        self._length = 0
        self._rng = rng
        self._budget = budget
        self._groups: dict[int, str] = {}

    def add(self, nodes: Nodes, *, ends: bool = True) -> None:
        """Append a text for a sequence of parsed nodes; `ends`: whether nothing follows it."""
        nodes = list(nodes)
        for place, (kind, of) in enumerate(nodes, 1):
            self._budget.take_steps(_STEPS_OF_A_NODE)
            last = ends and place == len(nodes)
            if kind is sre.LITERAL:
                self._write(chr(of))
            elif kind is sre.NOT_LITERAL:
                self._write(next(letter for letter in "ax" if ord(letter) != of))
            elif kind is sre.ANY:
                self._write(self._rng.choice(_PRINTABLE))
            elif kind is sre.IN:
                self._write(self._one_of(of))
            elif kind is sre.BRANCH:
                self.add(self._rng.choice(of[1]), ends=last)
            elif kind is sre.SUBPATTERN:
                group, _, _, inner = of
                before = len(self.pieces)
                self.add(inner, ends=last)
                if group is not None:
                    self._groups[group] = "".join(self.pieces[before:])
            elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
                least, most, inner = of
                num_repeats = self._rng.randint(least, min(most, least + self._more))
                for repeat in range(1, num_repeats + 1):
                    self._budget.take_steps(_STEPS_OF_A_NODE)
                    self.add(inner, ends=last and repeat == num_repeats)
            elif kind is sre.GROUPREF:
                self._write(self._groups.get(of, ""))
            elif kind is sre.AT and of in _ENDS:
                if any(self.pieces) if of in _BEGINNINGS else not last:
                    raise DeadEndError("has a pattern with ^ or $ in its midst; write it without")
            else:
                raise DeadEndError(f"has a pattern with {_REFUSED.get(kind, 'a word boundary')}; write it without")

    def _write(self, text: str) -> None:
        self._length += len(text)
        if self._length > MAX_CHARACTERS:
            raise UnmetError(f"asks for more than {MAX_CHARACTERS} characters; ask for fewer")
        self.pieces.append(text)

    def _one_of(self, members: Sequence[tuple[Any, Any]]) -> str:
        """Return a character of a class: a printable one of ASCII if there is one."""
        letters = self._parsed.letters.get(id(members))
        if letters is None:
            self._budget.take_steps(len(members))
            letters = self._parsed.letters[id(members)] = _letters(members)
        if letters:
            return self._rng.choice(letters)
        if members[0][0] is sre.NEGATE:
            raise DeadEndError("has a pattern with a class of characters that is empty; change it")
        kind, of = self._rng.choice(members)
        return chr(of) if kind is sre.LITERAL else chr(self._rng.randint(*of))


def _letters(members: Sequence[tuple[Any, Any]]) -> list[str]:
    """Return printable characters of a class, of one that is negated others if need be; empty: it has none."""
    negated = members[0][0] is sre.NEGATE
    members = members[negated:]
    literals = {of for kind, of in members if kind is sre.LITERAL}
    ranges = {of for kind, of in members if kind is sre.RANGE}
    categories = {of for kind, of in members if kind is sre.CATEGORY}

    def has(letter: str) -> bool:
        code = ord(letter)
        return (
            code in literals
            or any(first <= code <= last for first, last in ranges)
            or any(_CATEGORIES[category](letter) for category in categories)
        )

    for letters in (_PRINTABLE, _OTHERS) if negated else (_PRINTABLE,):
        found = [letter for letter in letters if has(letter) is not negated]
        if found:
            return found
    return []


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
