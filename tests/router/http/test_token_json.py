"""What is written of log-probabilities, beside dicts of the same given to a JSON encoder."""

import json
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.router.http.answer import BATCH
from lorrery.router.http.token_details import LogprobsJson, Run, TokenTexts
from lorrery.router.logprobs import NEVER, OutputLogprobs, TokenLogprobs
from lorrery.router.logprobs import Words as ModelWords
from lorrery.tokenizer.base import BOS_ID, EOS_ID, NUM_WORDS
from lorrery.tokenizer.file import BuiltinTokenizer

MODEL = ModelWords(range(3, 60))
FOREIGN = 900_000
tokens = st.lists(st.sampled_from([BOS_ID, EOS_ID, FOREIGN, *range(3, 60)]), max_size=2 * BATCH + 5)


class Alike:
    """A tokenizer whose tokens n and n + 10 are spelt alike; some have no text, or more bytes than characters."""

    special_ids = frozenset((EOS_ID,))

    def decode(self, token_ids: Any) -> str:
        return "<end>" * len(token_ids)

    def detokenizer(self) -> Any:
        class One:
            def push(self, token_ids: Any) -> str:
                return "".join("" if one % 10 == 4 else f'"é{one % 10}' for one in token_ids)

        return One()


@st.composite
def runs(draw: st.DrawFn) -> list[Run]:
    """Draw a prompt and an output."""
    prompt, output, seed = draw(tokens), draw(tokens), draw(st.integers(0, 2**64 - 1))
    context = draw(st.none() | st.integers(0, 2**64 - 1))
    logprobs = OutputLogprobs(MODEL, seed, EOS_ID, context)
    asked = OutputLogprobs(MODEL, seed, EOS_ID)
    return [Run(asked, -len(prompt), prompt, follows=False), Run(logprobs, 0, output)]


def known(runs: list[Run], num_top: int) -> list[TokenLogprobs | None]:
    """Return how likely each token is, one call each."""
    return [
        one.logprobs.at(one.position + at, token_id, num_top) if at or one.follows else None
        for one in runs
        for at, token_id in enumerate(one.token_ids)
    ]


def listed(one: TokenLogprobs, shown: str, texts: TokenTexts) -> list[tuple[int, str, float]]:
    """Return a token and then its alternatives."""
    others = zip(one.top_token_ids, one.top_logprobs, strict=True)
    return [
        (one.token_id, shown, one.logprob),
        *((token_id, texts.alone(token_id), value) for token_id, value in others if token_id != one.token_id),
    ]


def alone(texts: TokenTexts, runs: list[Run]) -> list[str]:
    """Return what the tokens are shown as, which do not depend on their context here."""
    return [texts.alone(token_id) for run in runs for token_id in run.token_ids]


@pytest.mark.parametrize("tokenizer", [BuiltinTokenizer(), Alike()])
@settings(max_examples=25)
@given(shown=runs(), num_top=st.integers(0, 20), offset=st.integers(0, 50), as_ids=st.booleans())
def test_completions(tokenizer: Any, shown: list[Run], num_top: int, offset: int, as_ids: bool) -> None:
    texts = TokenTexts(tokenizer)
    spelt = alone(texts, shown)
    token_ids = [token_id for run in shown for token_id in run.token_ids]
    widths = [0 if one in tokenizer.special_ids else len(text) for one, text in zip(token_ids, spelt, strict=True)]

    def name(token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if as_ids else text

    expected = {
        "text_offset": list(accumulate(widths[:-1], initial=offset)) if widths else [],
        "token_logprobs": [one and one.logprob for one in known(shown, 0)],
        "tokens": list(map(name, token_ids, spelt)),
        "top_logprobs": [
            one and {name(token_id, its): value for token_id, its, value in listed(one, text, texts)}
            for one, text in zip(known(shown, num_top), spelt, strict=True)
        ],
    }
    json_of = LogprobsJson(texts, as_token_ids=as_ids)
    parts = list(json_of.completion(shown, num_top, json_of.reading("", offset)))
    read = json.loads("".join(parts), object_pairs_hook=each_once)
    assert read == expected
    assert list(read) == list(expected)
    assert max(part.count("{") for part in parts) <= BATCH


@settings(max_examples=25)
@given(shown=runs(), num_top=st.integers(0, 20), as_ids=st.booleans())
def test_chats(shown: list[Run], num_top: int, as_ids: bool) -> None:
    texts = TokenTexts(Alike())

    def named(token_id: int, text: str, logprob: float, own: str | None = None) -> dict[str, Any]:
        name = f"token_id:{token_id}" if as_ids else text
        return {"token": name, "logprob": logprob, "bytes": list((name if own is None else own).encode())}

    output = shown[1:]
    content = [
        {
            **named(one.token_id, text, one.logprob, text),
            "top_logprobs": [named(*entry) for entry in listed(one, text, texts)[:num_top]],
        }
        for one, text in zip(known(output, num_top), alone(texts, output), strict=True)
        if one is not None
    ]
    json_of = LogprobsJson(texts, as_token_ids=as_ids)
    parts = list(json_of.chat(output, num_top, json_of.reading()))
    assert json.loads("".join(parts), object_pairs_hook=each_once) == {"content": content}
    assert max(part.count('"top_logprobs"') for part in parts) <= BATCH


@settings(max_examples=25)
@given(shown=runs(), num_top=st.integers(0, 20))
def test_prompts(shown: list[Run], num_top: int) -> None:
    texts = TokenTexts(Alike())

    def ranked(one: TokenLogprobs, text: str) -> dict[str, Any]:
        unlisted = NUM_WORDS + 1 if one.logprob == NEVER else 1
        ranks = {token_id: rank for rank, token_id in enumerate(one.top_token_ids, 1)}
        return {
            str(token_id): {"logprob": value, "rank": ranks.get(token_id, unlisted), "decoded_token": its}
            for token_id, its, value in listed(one, text, texts)
        }

    prompt = shown[0]
    parts = list(LogprobsJson(texts).prompt(prompt, num_top))
    spelt = alone(texts, [prompt])
    expected = [one and ranked(one, text) for one, text in zip(known([prompt], num_top), spelt, strict=True)]
    assert json.loads("".join(parts), object_pairs_hook=each_once) == expected
    assert max(part.count('"rank": 1,') for part in parts) <= BATCH


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Read an object in which no key comes twice."""
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)
