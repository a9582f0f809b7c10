"""Streams of several choices to a reader that falls behind: events are counted once, however they are written."""

import asyncio
import json
from functools import partial

import pytest

from lorrery.router import logprobs
from lorrery.router.http.answer import BATCH, PIECE_CHARACTERS, WRITER, Answer, Collected
from lorrery.router.http.openai_shapes import ChatShape, CompletionShape
from lorrery.router.http.token_details import Details, LogprobsJson, Prompt, TokenTexts
from lorrery.router.logprobs import OutputLogprobs
from lorrery.service.tasks import Turns
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.endings import FinishReason

NUM_CHOICES, NUM_TOKENS = 3, 12


class Words:
    """A tokenizer whose token 7 is the text `<7>`."""

    special_ids = frozenset()

    def detokenizer(self):
        class One:
            def push(self, token_ids):
                return "".join(f"<{one}>" for one in token_ids)

        return One()


JSON = LogprobsJson(TokenTexts(Words()))
LOGPROBS = OutputLogprobs(logprobs.Words(range(300)), seed=5, eos_id=999)


class PausedReader:
    """An ASGI client that stops reading after every seventh part and goes on when the generations have run on."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.asked_while_behind = self.written_past = 0
        self._readable = asyncio.Event()
        self._readable.set()

    @property
    def is_ready(self) -> bool:
        self.asked_while_behind += not self._readable.is_set()
        return self._readable.is_set()

    def write_now(self, body: bytes) -> None:
        assert self._readable.is_set()
        self.written_past += 1
        self._take(body)

    async def send(self, message) -> None:
        await self._readable.wait()
        if message["type"] == "http.response.body":
            self._take(message["body"])

    def _take(self, body: bytes) -> None:
        self.parts.append(body)
        if len(self.parts) % 7 == 0:
            self._readable.clear()
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, loop.call_soon, self._readable.set)  # when the others have had their turns

    async def receive(self):
        await asyncio.Event().wait()


async def generate(request, call) -> None:
    """Give a choice's tokens as the router does: without waiting where it can, the last one always awaited."""
    assert call.take_logprobs(LOGPROBS)
    for at in range(NUM_TOKENS):
        token = request.seed * 100 + at
        message = router_pb2.GenerateResponse(text=f"<{token}>", token_ids=[token])
        if at == NUM_TOKENS - 1:
            message.finish.reason = FinishReason.LENGTH.value
            message.finish.usage.CopyFrom(types_pb2.Usage(prompt_tokens=1, completion_tokens=NUM_TOKENS))
        if at == NUM_TOKENS - 1 or not call.write_now(message):
            await call.write(message)
        await asyncio.sleep(0)


async def chunks(shape):
    reader = PausedReader()
    requests = [router_pb2.GenerateRequest() for _ in range(NUM_CHOICES)]
    for index, request in enumerate(requests):
        request.seed = index
    answer = Answer([partial(generate, request) for request in requests], shape, Turns(), stream=True)
    await answer({"state": {WRITER: reader}}, reader.receive, reader.send)
    assert reader.asked_while_behind > 2  # events were refused while the reader was behind,
    assert reader.written_past > 4  # and taken past ASGI while it was not
    events = [one for one in b"".join(reader.parts).decode().split("\n\n") if one]
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
    return [[one for one in choices if one["index"] == index] for index in range(NUM_CHOICES)]


@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_each_choice_of_a_chat_has_its_role_once_and_all_its_text(with_logprobs):
    details = Details(JSON, NUM_CHOICES, top_logprobs=0) if with_logprobs else None
    for index, own in enumerate(await chunks(ChatShape("id", "model", NUM_CHOICES, False, details))):
        assert [one["delta"].get("role") for one in own] == ["assistant"] + [None] * NUM_TOKENS
        assert own[0]["delta"]["content"] == ""
        whole = "".join(f"<{index * 100 + at}>" for at in range(NUM_TOKENS))
        assert "".join(one["delta"]["content"] for one in own) == whole
        assert [one["finish_reason"] for one in own] == [None] * NUM_TOKENS + ["length"]


async def test_text_offsets_of_each_choice_follow_its_own_text():
    details = Details(JSON, NUM_CHOICES, top_logprobs=0)
    for own in await chunks(CompletionShape("id", "model", NUM_CHOICES, False, details)):
        shown = ""
        for one in own:
            assert one["logprobs"]["text_offset"] == [len(shown)]
            shown += one["text"]


def details(prompt_tokens: int, **shown) -> Details:
    prompt = Prompt("p" * prompt_tokens, [3 + at % 200 for at in range(prompt_tokens)], LOGPROBS)
    return Details(JSON, 1, [prompt] * NUM_CHOICES, top_logprobs=20, **shown)


async def collected(shape, reader=None):
    reader = reader or PausedReader()
    requests = [router_pb2.GenerateRequest(seed=index) for index in range(NUM_CHOICES)]
    answer = Answer([partial(generate, request) for request in requests], shape, Turns(0.0), stream=False)
    await answer({"state": {}}, reader.receive, reader.send)
    return json.loads(b"".join(reader.parts))


@pytest.mark.parametrize("prompt_tokens", [1, BATCH, BATCH + 1, 3 * BATCH + 7])
async def test_a_long_echo_comes_in_events_of_few_tokens_that_add_up_to_the_whole_answer(prompt_tokens: int):
    whole = await collected(CompletionShape("id", "model", 1, False, details(prompt_tokens, echo=True)))
    streamed = await chunks(CompletionShape("id", "model", 1, False, details(prompt_tokens, echo=True)))
    for index, own in enumerate(streamed):
        choice = whole["choices"][index]
        assert "".join(one["text"] for one in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for one in own for value in one["logprobs"][name]] == values
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert max(len(one["logprobs"]["tokens"]) for one in own) <= BATCH + 1


async def test_an_answer_of_many_megabytes_is_made_as_it_is_written(monkeypatch: pytest.MonkeyPatch):
    num_asked, asked = 0, OutputLogprobs.at

    def at(self, *args):
        nonlocal num_asked
        num_asked += 1
        return asked(self, *args)

    monkeypatch.setattr(OutputLogprobs, "at", at)
    shape = CompletionShape("id", "model", 1, False, details(5000, echo=True, prompt_logprobs=20))
    made: list[int] = []

    class Reader(PausedReader):
        async def send(self, message) -> None:
            made.append(num_asked)
            self.parts.append(message.get("body", b""))

    reader = Reader()
    await collected(shape, reader)
    assert sum(map(len, reader.parts)) > 10e6
    assert max(map(len, reader.parts)) < 4 * PIECE_CHARACTERS
    assert max(later - earlier for earlier, later in zip([0, *made], made, strict=False)) < 6000
    assert num_asked > NUM_CHOICES * 3 * 5000


@pytest.mark.parametrize(
    ("n", "usages", "prompts", "outputs", "whole", "streamed"),
    [
        (1, [(40, 32)], 40, 3, 32, 32),
        (2, [(40, 32), (40, 16)], 40, 6, 16, 32),  # the second output of one prompt found less
        (1, [(40, 32), (24, 0)], 64, 6, 0, 32),
        (2, [(40, 0), (40, 32), (24, 0), (24, 16)], 64, 12, 16, 0),
    ],
)
def test_usage_counts_each_prompt_once_and_has_the_cached_tokens_of_one_output(
    n, usages, prompts, outputs, whole, streamed
):
    """As in vLLM, of the last output in a whole response, and of the first in a stream."""
    choices = [
        Collected(
            finish=router_pb2.Finish(
                reason=2, usage=types_pb2.Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=3)
            )
        )
        for prompt, cached in usages
    ]
    shape = CompletionShape("id", "model", n, include_usage=True)
    answer = json.loads("".join(shape.whole(choices)))["usage"]
    last, done, _ = shape.last_events([choice.usage for choice in choices]).decode().split("\n\n")
    assert done == "data: [DONE]"
    for usage, cached in ((answer, whole), (json.loads(last.removeprefix("data: "))["usage"], streamed)):
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompts, outputs)
        assert usage["total_tokens"] == prompts + outputs
