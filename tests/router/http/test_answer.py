"""Streams of several choices to a reader that falls behind: events are counted once, however they are written."""

import asyncio
import json
from functools import partial

import pytest

from lorrery.router.http.answer import WRITER, Answer
from lorrery.router.http.openai_details import Details
from lorrery.router.http.openai_shapes import ChatShape, CompletionShape
from lorrery.v1 import router_pb2, types_pb2
from lorrery.vocabulary.finish_reason import FinishReason

NUM_CHOICES, NUM_TOKENS = 3, 12


class Words:
    """A tokenizer whose token 7 is the text `<7>`."""

    def detokenizer(self):
        class One:
            def push(self, token_ids):
                return "".join(f"<{one}>" for one in token_ids)

            def flush(self):
                return ""

        return One()


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
    for at in range(NUM_TOKENS):
        token = request.seed * 100 + at
        message = router_pb2.GenerateResponse(text=f"<{token}>", token_ids=[token])
        message.logprobs.add(logprob=-1.0)
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
    answer = Answer([partial(generate, request) for request in requests], shape, stream=True)
    await answer({"state": {WRITER: reader}}, reader.receive, reader.send)
    assert reader.asked_while_behind > 2  # events were refused while the reader was behind,
    assert reader.written_past > 4  # and taken past ASGI while it was not
    events = [one for one in b"".join(reader.parts).decode().split("\n\n") if one]
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
    return [[one for one in choices if one["index"] == index] for index in range(NUM_CHOICES)]


@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_each_choice_of_a_chat_has_its_role_once_and_all_its_text(with_logprobs):
    details = Details(Words(), NUM_CHOICES, top_logprobs=0) if with_logprobs else None
    for index, own in enumerate(await chunks(ChatShape("id", "model", NUM_CHOICES, False, details))):
        assert [one["delta"].get("role") for one in own] == ["assistant"] + [None] * (NUM_TOKENS - 1)
        whole = "".join(f"<{index * 100 + at}>" for at in range(NUM_TOKENS))
        assert "".join(one["delta"]["content"] for one in own) == whole
        assert [one["finish_reason"] for one in own] == [None] * (NUM_TOKENS - 1) + ["length"]


async def test_text_offsets_of_each_choice_follow_its_own_text():
    details = Details(Words(), NUM_CHOICES, top_logprobs=0)
    for own in await chunks(CompletionShape("id", "model", NUM_CHOICES, False, details)):
        shown = ""
        for one in own:
            assert one["logprobs"]["text_offset"] == [len(shown)]
            shown += one["text"]
