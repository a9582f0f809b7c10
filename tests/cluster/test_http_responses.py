"""OpenAI's Responses route before OpenAI's own package."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from lorrery.service.local.cluster import LocalCluster
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


async def test_log_probabilities_are_shown_where_they_are_wanted(openai: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "lora-1", "input": "x", "max_output_tokens": 4, "extra_body": EXACT}
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await openai.responses.create(**asked, **wanted)
    (message,) = whole.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    shown = part.logprobs or []
    assert "".join(one.token for one in shown) == part.text
    assert {len(one.top_logprobs) for one in shown} == {2}
    events = [event async for event in await openai.responses.create(**asked, **wanted, stream=True)]
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [(one.token, one.logprob) for one in streamed] == [(one.token, one.logprob) for one in shown]
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output[0].content == message.content  # type: ignore[union-attr]
    plain = await openai.responses.create(**asked, top_logprobs=2)
    assert plain.top_logprobs is None


async def test_a_response_repeats_what_was_asked(openai: AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    answer = await openai.responses.create(
        model="lora-1",
        input="x",
        max_output_tokens=4,
        temperature=0.5,
        top_p=0.5,
        metadata={"a": "b"},
        tools=[tool],
        tool_choice="none",
        text={"format": {"type": "text"}},
        reasoning={"effort": "low"},
        extra_body={"request_id": "resp_mine", "presence_penalty": 1},
    )
    shown = answer.model_dump()
    told = ("id", "temperature", "top_p", "metadata", "tool_choice", "max_output_tokens", "presence_penalty")
    assert [shown[name] for name in told] == ["resp_mine", 0.5, 0.5, {"a": "b"}, "none", 4, 1.0]
    assert shown["tools"][0]["parameters"] == {"type": "object"}
    assert shown["tools"][0]["strict"] is None
    assert shown["text"] == {"format": {"type": "text"}, "verbosity": None}
    assert shown["reasoning"]["effort"] == "low"


async def test_a_prompt_that_is_too_long_may_be_cut(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    long: dict[str, Any] = {"model": "lora-1", "input": "word " * 5000, "max_output_tokens": 4}
    with pytest.raises(BadRequestError, match="maximum context length is 4096 tokens") as caught:
        await openai.responses.create(**long)
    assert caught.value.param == "input_tokens"
    answer = await openai.responses.create(**long, truncation="auto")
    assert answer.usage is not None
    most = cluster.settings.scheduler.max_req_input_len
    assert (answer.usage.input_tokens, answer.max_output_tokens) == (most, min(4, 4096 - most))


@pytest.mark.parametrize(
    ("asked", "param", "kind", "why"),
    [
        ({"background": True}, "background", "invalid_request_error", "responses are not kept"),
        ({"background": True, "store": False}, "background", "BadRequestError", "needs store"),
        ({"prompt": {"id": "p"}}, "prompt", "BadRequestError", "prompts are not kept"),
        ({"text": {"format": {"type": "xml"}}}, "body.text.format.ResponseFormatText.type", "Bad Request", "'text'"),
        (
            {"text": {"format": {"type": "text"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "BadRequestError",
            "two forms",
        ),
        ({"tools": [{"type": "function"}]}, "body.tools.0.FunctionTool.name", "Bad Request", "Field required"),
        ({"tool_choice": "required"}, "tool_choice", "BadRequestError", "there are no tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "BadRequestError", "there are no tools"),
        ({"tool_choice": "x"}, "body.tool_choice", "Bad Request", "'required'"),
        ({"max_output_tokens": 0}, "max_tokens", "BadRequestError", "at least 1"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "BadRequestError", "max_model_len=4096"),
        ({"include": ["x"]}, "body.include.0", "Bad Request", "Input should be"),
        ({"seed": 2**63}, "body.seed", "Bad Request", "less than"),
        ({"presence_penalty": 2.1}, "body.presence_penalty", "Bad Request", "less than or equal to 2"),
        ({"service_tier": None}, "body.service_tier", "Bad Request", "Input should be"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "BadRequestError", "'item_reference'"),
        ({"input": [{"content": "x"}]}, "body.input", "Bad Request", "Input should be"),
    ],
)
async def test_what_is_not_to_be_had_is_refused_with_the_reason(
    openai: AsyncOpenAI, asked: dict[str, Any], param: str, kind: str, why: str
) -> None:
    with pytest.raises(BadRequestError, match=why) as caught:
        await openai.responses.create(model="lora-1", input="x", extra_body=asked)
    told: Any = caught.value.body
    assert (told["param"], told["type"], told["code"]) == (param, kind, 400)


async def test_what_vllm_passes_over_is_passed_over(openai: AsyncOpenAI) -> None:
    ignored = {
        "n": 2,
        "prompt_logprobs": "x",
        "min_tokens": 99,
        "conversation": "c",
        "best_of": 0,
        "response_format": 5,
    }
    answer = await openai.responses.create(model="lora-1", input="x", max_output_tokens=4, extra_body=ignored)
    assert len(answer.output) == 1


async def test_no_response_is_kept(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    for asked in (
        openai.responses.create(model="lora-1", input="x", previous_response_id="resp_1"),
        openai.responses.retrieve("resp_1"),
        openai.responses.cancel("resp_1"),
    ):
        with pytest.raises(NotFoundError, match="there is no response 'resp_1'") as caught:
            await asked
        told: Any = caught.value.body
        assert (told["param"], told["type"], told["code"]) == ("response_id", "invalid_request_error", 404)
    wrong = await exchange(cluster, "GET", "/v1/responses/resp_1?starting_after=x")
    assert (status_of(wrong), json_of(wrong)["error"]["param"]) == (400, "query.starting_after")


async def test_an_unknown_model_and_an_unknown_route_are_not_found(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="GET /v1/models") as caught:
        await openai.responses.create(model="nobody", input="x")
    assert (caught.value.param, caught.value.type) == ("model", "NotFoundError")
    answer = await exchange(cluster, "POST", "/v1/responses/batches", {"model": "lora-1", "input": "x"})
    assert status_of(answer) == 405


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
    assert error.code is not None
    assert failed.type == "response.failed"
    assert failed.response.error is not None
    assert (failed.response.status, failed.response.error.message) == ("failed", error.message)
