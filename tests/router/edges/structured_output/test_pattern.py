"""Drawn texts match their pattern as a whole, says Python's matcher, which the drawing does not use."""

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.router.edges.structured_output.budget import Budget, UnmetError
from lorrery.router.edges.structured_output.pattern import draw

ATOMS = st.sampled_from(
    ["a", "é", r"\.", ".", "[a-f0-9]", "[^a-z]", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[^\x20-\x7e]", r"[\w-]"]
)


def _combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    quantifiers = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{'|'.join(pair)})"),
        st.tuples(inner, quantifiers).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


PATTERNS = st.recursive(ATOMS, _combined, max_leaves=8)


@given(pattern=PATTERNS, seed=st.integers(0, 2**64 - 1))
def test_a_drawn_text_matches(pattern: str, seed: int) -> None:
    assert re.fullmatch(pattern, draw(pattern, Random(seed), Budget()), re.DOTALL)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{4}-(0[1-9]|1[0-2])$",
        r"(yes|no)",
        r"(?P<who>[a-z]+) and (?P=who)",
        r"([ab])\1",
        r"\A\w+\Z",
        "",
    ],
)
def test_patterns_of_clients(pattern: str) -> None:
    for seed in range(200):
        assert re.fullmatch(pattern, draw(pattern, Random(seed), Budget()))


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"[^\s\S]x", "class of characters that is empty"),
        ("(?=a)b", "lookahead"),
        ("(?<!a)b", "lookahead or lookbehind"),
        (r"\bword\b", "word boundary"),
        ("(?>a+)b", "atomic group"),
        ("a++b", "possessive"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("a^b", "in its midst"),
        ("a$b", "in its midst"),
        ("(a$)b", "in its midst"),
        (r"[^\d\D]", "class of characters that is empty"),
        ("(", "no regular expression"),
        (r"\p{L}", "no regular expression"),
        ("(" * 2000, "cannot be read|no regular expression"),
        ("(" * 1000 + ")" * 1000, "cannot be read|no regular expression|more than"),
        ("(((a{1000}){1000}){1000})", "more than 50000 steps"),
        ("(){4294967294}", "more than 50000 steps"),
        ("a{99999999999999999999}", "cannot be read|no regular expression"),
    ],
)
def test_what_is_not_supported_is_named(pattern: str, why: str) -> None:
    with pytest.raises(UnmetError, match=why):
        draw(pattern, Random(0), Budget())


def test_a_pattern_that_takes_for_ever_to_match_does_not_to_draw() -> None:
    assert set(draw("(a+)+$", Random(1), Budget())) == {"a"}
