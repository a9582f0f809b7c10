"""OpenAI's Responses route before OpenAI's own package."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from lorrery.local.cluster import LocalCluster
from tests.cluster.client import Ask
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster
from tests.cluster.http_client import exchange, json_of, status_of, text_of

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

EXACT = {"ignore_eos": True, "seed": 5}
PART = {"type": "input_text", "text": "hello"}
BEFORE = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
BEHIND = ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all."""
    async with running_cluster(
        tmp_path_factory.mktemp("cluster"), "time_scale=0.1", "router.request_faults=true"
    ) as cluster:
        yield cluster
        await nothing_held(cluster)


async def test_a_response_has_the_text_and_the_usage_of_a_chat(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    answer = await openai.responses.create(
        model="lora-1", input="hello", instructions="be brief", max_output_tokens=6, extra_body=EXACT
    )
    chat = await openai.chat.completions.create(
        model="lora-1",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        max_tokens=6,
        extra_body=EXACT,
    )
    assert answer.output_text == text_of(cluster, Ask(seed=5, adapter_id="lora-1", max_new_tokens=6))
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.model) == ("incomplete", "lora-1")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert chat.usage is not None
    # As in vLLM, the prompt of a response is framed beside what the template writes.
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens + 1, 6)
    assert answer.usage.input_tokens_details.cached_tokens == 0


async def test_a_stream_has_every_event_in_order_and_numbered(openai: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "lora-1",
        "input": [{"role": "user", "content": [PART]}],
        "max_output_tokens": 6,
        "extra_body": EXACT,
    }
    whole = await openai.responses.create(**asked)
    events = [event async for event in await openai.responses.create(**asked, stream=True)]
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [*BEFORE, *["response.output_text.delta"] * len(deltas), *BEHIND]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text
    last = events[-1]
    assert last.type == "response.completed"
    assert (last.response.output_text, last.response.status) == (whole.output_text, "incomplete")
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 6
    async with openai.responses.stream(**asked) as stream:
        assert dict.fromkeys([event.type async for event in stream]) == dict.fromkeys(kinds)
        assert (await stream.get_final_response()).output_text == whole.output_text


async def test_a_conversation_goes_on_with_the_output_of_a_response(openai: AsyncOpenAI) -> None:
    first = await openai.responses.create(model="lora-1", input="hello", max_output_tokens=4)
    spoken: list[Any] = [{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "and then"}]
    tools = [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "nothing there"},
    ]
    shorter = await openai.responses.create(model="lora-1", input=spoken, max_output_tokens=2)
    longer = await openai.responses.create(model="lora-1", input=[*spoken, *tools], max_output_tokens=2)
    assert first.usage is not None
    assert shorter.usage is not None
    assert longer.usage is not None
    assert first.usage.input_tokens < shorter.usage.input_tokens < longer.usage.input_tokens


@pytest.mark.parametrize(
    ("asked", "param", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "responses are not kept"),
        ({"background": True}, "background", "responses are not kept"),
        ({"n": 2}, "n", "a response is one output"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text, json_object or json_schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema", "types are"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice", "tools has no function"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "not among tools"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        ({"top_logprobs": 2}, "top_logprobs", "/v1/chat/completions"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "/v1/chat/completions"),
        ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens", "at most max_output_tokens, 4"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "maximum context length is 4096 tokens"),
        (
            {"input": [{"role": "user", "content": [PART, {"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[1].type",
            "the model reads text alone",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "'item_reference'"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing"),
    ],
)
async def test_what_is_not_to_be_had_is_refused_with_the_reason(
    openai: AsyncOpenAI, asked: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(BadRequestError, match=why) as caught:
        await openai.responses.create(model="lora-1", input="x", extra_body=asked)
    assert caught.value.param == param


async def test_an_unknown_model_and_an_unknown_route_say_what_there_is(
    cluster: LocalCluster, openai: AsyncOpenAI
) -> None:
    with pytest.raises(NotFoundError, match="GET /v1/models"):
        await openai.responses.create(model="nobody", input="x")
    answer = await exchange(cluster, "POST", "/v1/embeddings", {"model": "lora-1", "input": "x"})
    assert status_of(answer) == 404
    message = json_of(answer)["error"]["message"]
    assert message.startswith("there is no '/v1/embeddings' here; there are /v1/completions, /v1/chat/completions, ")
    assert "/v1/messages/count_tokens" in message


async def test_an_error_within_a_stream_is_its_last_two_events(openai: AsyncOpenAI) -> None:
    stream = await openai.responses.create(
        model="lora-1",
        input="x",
        max_output_tokens=50,
        stream=True,
        extra_body=EXACT,
        extra_headers={"lorrery-fault": "cut,after=3"},
    )
    *_, error, failed = [event async for event in stream]
    assert error.type == "error"
    assert error.code == "fault_injected"
    assert failed.type == "response.failed"
    assert failed.response.error is not None
    assert (failed.response.status, failed.response.error.message) == ("failed", error.message)
