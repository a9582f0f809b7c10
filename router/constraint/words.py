"""Plain words for the strings of an output."""

from functools import cache
from random import Random

from lorrery.router.constraint.budget import Budget, DeadEndError
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
