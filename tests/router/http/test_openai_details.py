"""Log-probabilities beside the text of the same response, whatever bytes the tokens of a character are cut into."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorrery.router.http.answer import Collected
from lorrery.router.http.openai_shapes import ChatShape, CompletionShape
from lorrery.router.http.token_details import Details, LogprobsJson, Prompt, TokenTexts
from lorrery.router.logprobs import OutputLogprobs, Words
from lorrery.router.open_request import Output
from lorrery.router.request import Finish, Request, Usage
from lorrery.router.sampling import SamplingParams
from lorrery.tokenizer.base import EOS_ID
from lorrery.tokenizer.file import SHIPPED, BuiltinTokenizer, FileTokenizer
from lorrery.v1 import router_pb2
from lorrery.vocabulary.endings import FinishReason

TOKENIZER = BuiltinTokenizer()
VOCABULARY = FileTokenizer(SHIPPED).vocab_size
BYTE_0 = 1908
"""The token of byte 0; those of the others follow."""
TEXTS = TokenTexts(TOKENIZER)
LOGPROBS = OutputLogprobs(Words(TOKENIZER.word_ids), 5, EOS_ID)

CHARACTERS = st.text(st.sampled_from("aé世😀 \ufffd<s>"), max_size=8)
of_bytes = st.binary(max_size=12).map(lambda content: [BYTE_0 + byte for byte in content])
some_bytes = st.lists(st.sampled_from([BYTE_0 + byte for byte in "aé世😀".encode()]), max_size=12)
outputs = st.one_of(
    CHARACTERS.map(TOKENIZER.encode_stop),
    of_bytes,
    some_bytes,
    st.lists(st.integers(3, VOCABULARY - 1), max_size=12),
).flatmap(lambda token_ids: st.sampled_from([[*token_ids, EOS_ID], token_ids or [EOS_ID]]))
prompts = st.one_of(CHARACTERS, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8))


def messages(token_ids: Sequence[int], size: int) -> Iterator[tuple[list[int], str, Finish | None]]:
    """Yield the contents of an output's messages, `size` tokens each."""
    request = Request("r", "", "", b"\3\0\0\0", SamplingParams(), (), 1, eos_id=EOS_ID)
    output = Output(request, TOKENIZER)
    for at in range(0, len(token_ids), size):
        is_last = at + size >= len(token_ids)
        finish = Finish(FinishReason.STOP, Usage(1, len(token_ids))) if is_last else None
        yield output.push(list(token_ids[at : at + size]), finish)


def choices(shape: CompletionShape, token_ids: Sequence[int], size: int, *, stream: bool) -> list[dict[str, Any]]:
    """Return what a response has of its only choice, event by event, or in one piece."""
    if stream:
        events = list(shape.echo(0))
        for new, text, finish in messages(token_ids, size):
            message = router_pb2.GenerateResponse(token_ids=new, text=text)
            if finish is not None:
                message.finish.reason = 1
            events.append(shape.event(0, message, LOGPROBS))
        lines = b"".join(events).decode().splitlines()
        found = [json.loads(line.removeprefix("data: "))["choices"] for line in lines if line]
        return [choice for one in found for choice in one]
    collected = Collected()
    for new, text, _ in messages(token_ids, size):
        collected.text.write(text)
        collected.token_ids.extend(new)
    collected.finish = router_pb2.Finish(reason=1)
    collected.logprobs = LOGPROBS
    return json.loads("".join(shape.whole([collected])))["choices"]


def details(prompt: str | list[int] | None = None, *, as_token_ids: bool = False) -> Details:
    json_of = LogprobsJson(TEXTS, as_token_ids=as_token_ids)
    if prompt is None:
        return Details(json_of, 1, top_logprobs=1)
    token_ids = TOKENIZER.encode_prompt(prompt) if isinstance(prompt, str) else prompt
    text = prompt if isinstance(prompt, str) and prompt else TOKENIZER.decode(token_ids)
    return Details(json_of, 1, [Prompt(text, token_ids, LOGPROBS)], top_logprobs=1, echo=True)


def shape_of(kind: type[CompletionShape], shown: Details) -> CompletionShape:
    return kind("r", "m", 1, include_usage=False, details=shown)


@pytest.mark.parametrize("stream", [False, True])
@settings(max_examples=60)
@given(token_ids=outputs, size=st.integers(1, 3))
@example(token_ids=TOKENIZER.encode_stop("naïve 😀"), size=1)
def test_bytes_of_a_chat_are_those_of_its_content(token_ids: list[int], size: int, stream: bool) -> None:
    found = choices(shape_of(ChatShape, details()), token_ids, size, stream=stream)
    content = "".join((one.get("delta") or one.get("message") or {}).get("content") or "" for one in found)
    tokens = [token for one in found for token in (one["logprobs"] or {"content": []})["content"]]
    assert len(tokens) == len(token_ids)
    own = [one for one, token_id in zip(tokens, token_ids, strict=True) if token_id != EOS_ID]
    assert b"".join(bytes(one["bytes"]) for one in own) == content.encode()
    assert "".join(one["token"] for one in own) == content
    assert all(one["top_logprobs"][0]["token"] == one["token"] for one in tokens)


@pytest.mark.parametrize("stream", [False, True])
@settings(max_examples=60)
@given(token_ids=outputs, size=st.integers(1, 3), prompt=st.none() | prompts, as_token_ids=st.booleans())
@example(token_ids=TOKENIZER.encode_stop("ï"), size=1, prompt="a<s>é", as_token_ids=False)
@example(token_ids=TOKENIZER.encode_stop("ï"), size=1, prompt="世" * 100, as_token_ids=True)
def test_offsets_index_the_text_of_a_completion(
    token_ids: list[int], size: int, prompt: str | list[int] | None, as_token_ids: bool, stream: bool
) -> None:
    shown = details(prompt, as_token_ids=as_token_ids)
    found = choices(shape_of(CompletionShape, shown), token_ids, size, stream=stream)
    text = "".join(one["text"] for one in found)
    tokens = [token for one in found for token in one["logprobs"]["tokens"]]
    offsets = [offset for one in found for offset in one["logprobs"]["text_offset"]]
    every = [*(shown.prompts[0].token_ids if shown.prompts else ()), *token_ids]
    assert len(tokens) == len(offsets) == len(every)
    assert offsets == sorted(offsets)
    if as_token_ids:
        assert tokens == [f"token_id:{token_id}" for token_id in every]
        return
    ends = [*offsets[1:], len(text)]
    for token, offset, end, token_id in zip(tokens, offsets, ends, every, strict=True):
        if token_id in TOKENIZER.special_ids:
            assert text[offset:end] in ("", token)
        elif not (isinstance(prompt, list) and end == len(shown.prompts[0].text)):
            assert text[offset:end] == token


def test_every_token_of_the_vocabulary_is_shown_as_its_text() -> None:
    """Each after one byte of a character, which it cuts, completes, or goes on with."""
    for before in ("é", "世", "😀"):
        first = TOKENIZER.encode_stop(before)[0]
        token_ids = [one for token_id in range(3, VOCABULARY) for one in (first, token_id)]
        (whole,) = choices(shape_of(CompletionShape, details()), token_ids, len(token_ids), stream=False)
        assert "".join(whole["logprobs"]["tokens"]) == whole["text"]
        offsets = whole["logprobs"]["text_offset"]
        pieces = [whole["text"][at:end] for at, end in zip(offsets, [*offsets[1:], None], strict=True)]
        assert pieces == whole["logprobs"]["tokens"]
