"""Structured outputs and calls of tools: OpenAI's package reads them, on every route; Anthropic's byte for byte."""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from lorrery.service.local.cluster import LocalCluster
from lorrery.tokenizer.file import open_tokenizer
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster
from tests.cluster.http_client import exchange, json_of, status_of, unchunked

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

MODEL = "Llama-3-8B"
HELLO: Any = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"]}
CITY["$defs"] = {"City": {"type": "string", "minLength": 3}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
FLAT_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
THEIR_TOOLS = [{"name": "weather", "input_schema": CITY}, {"name": "now", "input_schema": {"type": "object"}}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Step(BaseModel):
    """A part of what is asked for."""

    explanation: str
    kind: Literal["guess", "fact"]
    sources: list[int]


class Solution(BaseModel):
    """What is asked for."""

    steps: list[Step]
    answer: float | None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all, whose model calls tools in half of its outputs."""
    folder = tmp_path_factory.mktemp("cluster")
    async with running_cluster(folder, "time_scale=0.05", "router.tool_call_probability=0.5") as cluster:
        yield cluster
        await nothing_held(cluster)


async def test_every_route_parses_what_a_class_describes(openai: AsyncOpenAI) -> None:
    chat = await openai.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Solution)
    assert isinstance(chat.choices[0].message.parsed, Solution)
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    text = chat.choices[0].message.content or ""
    assert chat.usage.completion_tokens == len(open_tokenizer(None).encode_stop(text)) + 1  # and its end
    response = await openai.responses.parse(model="lora-1", input="hello", text_format=Solution)
    assert isinstance(response.output_parsed, Solution)
    completion = await openai.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=2000,
        extra_body={"structured_outputs": {"json": Solution.model_json_schema()}},
    )
    Solution.model_validate_json(completion.choices[0].text)


async def test_a_stream_parses_too_and_is_the_same_by_seed(openai: AsyncOpenAI) -> None:
    async with openai.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Solution, seed=4) as stream:
        num_events = len([event async for event in stream if event.type == "content.delta"])
        (streamed,) = (await stream.get_final_completion()).choices
    whole = await openai.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Solution, seed=4)
    assert streamed.message.parsed == whole.choices[0].message.parsed
    assert num_events > 5


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"json": json.dumps(CITY)}}, lambda text: len(json.loads(text)["city"]) > 2),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"regex": r"\d{3}-[a-c]+"}}, lambda text: text[:3].isdecimal() and text[3] == "-"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"mock_output": "Grüße 😀\n"}, lambda text: text == "Grüße 😀\n"),
        ({"mock_output": ""}, lambda text: text == ""),
        ({"mock_output": "one two", "ignore_eos": True, "min_tokens": 50}, lambda text: text == "one two"),
        ({"mock_output": "one two", "stop": [" two"]}, lambda text: text == "one"),
    ],
)
async def test_each_way_to_ask_for_a_form(openai: AsyncOpenAI, asked: dict[str, Any], fits: Any) -> None:
    chat = await openai.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, logprobs=True, top_logprobs=1, extra_body=asked
    )
    for choice in chat.choices:
        assert choice.finish_reason == "stop"
        assert fits(choice.message.content), choice.message.content
        assert choice.logprobs is not None
        assert {token.logprob for token in choice.logprobs.content or ()} == {0.0}
    completion = await openai.completions.create(model="lora-0", prompt=["x", "y"], max_tokens=99, extra_body=asked)
    assert all(fits(choice.text) for choice in completion.choices)


async def test_outputs_of_one_request_differ(openai: AsyncOpenAI) -> None:
    chat = await openai.chat.completions.create(
        model=MODEL, messages=HELLO, n=8, seed=1, extra_body={"structured_outputs": {"regex": "[a-z]{20}"}}
    )
    assert len({choice.message.content for choice in chat.choices}) == 8


async def test_an_output_cut_off_says_so(openai: AsyncOpenAI) -> None:
    for tools in ({}, {"tools": TOOLS, "tool_choice": NAMED}):
        chat = await openai.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=3, extra_body=tools or {"structured_outputs": {"json": CITY}}
        )
        (choice,) = chat.choices
        assert choice.finish_reason == "length"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 3


def _check_calls(calls: Any) -> None:
    assert 1 <= len(calls) <= 2
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        given = json.loads(call.function.arguments)
        assert set(given) == ({"city"} if call.function.name == "weather" else set())


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_chat_calls_the_tools_that_it_must(openai: AsyncOpenAI, choice: Any) -> None:
    reason = "tool_calls" if choice == "required" else "stop"  # as OpenAI's and vLLM's
    seen: set[str] = set()
    for seed in range(12):
        chat = await openai.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=choice, seed=seed
        )
        message = chat.choices[0].message
        assert chat.choices[0].finish_reason == reason
        assert message.content == ""
        _check_calls(message.tool_calls)
        async with openai.chat.completions.stream(
            model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=choice, seed=seed
        ) as stream:
            (streamed,) = (await stream.get_final_completion()).choices
        assert streamed.finish_reason == reason
        told = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]  # type: ignore[union-attr]
        assert [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()] == told
        seen |= {name for name, _ in told}
    assert seen == ({"weather", "now"} if choice == "required" else {"weather"})


async def test_one_call_at_most_where_a_client_wants_so(openai: AsyncOpenAI) -> None:
    for several, most in ((True, {1, 2}), (False, {1})):
        chat = await openai.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=several, n=20, seed=3
        )
        assert {len(choice.message.tool_calls or ()) for choice in chat.choices} == most


async def test_where_it_is_free_a_model_calls_tools_as_often_as_the_setting_says(openai: AsyncOpenAI) -> None:
    chat = await openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, n=60, seed=9, max_tokens=400)
    called = [choice for choice in chat.choices if choice.message.tool_calls]
    assert 18 <= len(called) <= 42
    assert {choice.finish_reason for choice in called} == {"tool_calls"}
    assert all(choice.message.content for choice in chat.choices if choice not in called)
    never = await openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="none", n=20, max_tokens=4
    )
    assert not any(choice.message.tool_calls for choice in never.choices)


async def test_a_client_can_say_which_calls(openai: AsyncOpenAI) -> None:
    calls = [{"name": "now", "parameters": {}}, {"name": "weather", "parameters": {"city": '}"'}}]
    chat = await openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, extra_body={"mock_output": json.dumps(calls)}
    )
    (choice,) = chat.choices
    assert choice.finish_reason == "tool_calls"
    told = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]  # type: ignore[union-attr]
    assert told == [("now", {}), ("weather", {"city": '}"'})]
    text = await openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, extra_body={"mock_output": "[no call]"}
    )
    assert (text.choices[0].message.content, text.choices[0].finish_reason) == ("[no call]", "stop")


async def test_what_a_client_says_is_the_call_that_it_requires(openai: AsyncOpenAI, cluster: LocalCluster) -> None:
    for choice, said in ((NAMED, '{"city": 3'), ("required", '[{"name": "now", "parameters": {"a": 1}}]')):
        chat = await openai.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=choice, extra_body={"mock_output": said}
        )
        (call,) = chat.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert call.function.arguments == ('{"city": 3' if choice == NAMED else '{"a": 1}')
    theirs = {"model": MODEL, "messages": HELLO, "max_tokens": 99, "tools": THEIR_TOOLS, "tool_choice": {"type": "any"}}
    said = '[{"name": "now", "parameters": {"a": 1}}]'
    whole = json_of(await exchange(cluster, "POST", "/v1/messages", {**theirs, "mock_output": said}))
    assert [(block["name"], block["input"]) for block in whole["content"]] == [("now", {"a": 1})]


async def test_a_form_precedes_calls_that_are_not_required(openai: AsyncOpenAI) -> None:
    chat = await openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, n=20, seed=1, response_format={"type": "json_object"}
    )
    assert not any(choice.message.tool_calls for choice in chat.choices)
    assert all(isinstance(json.loads(choice.message.content or ""), dict) for choice in chat.choices)


async def test_tools_that_cannot_be_drawn_are_passed_over(openai: AsyncOpenAI) -> None:
    odd: Any = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "if": True}}}
    for choice in ("required", "auto"):
        chat = await openai.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[odd, *TOOLS], tool_choice=choice, n=30, seed=2, max_tokens=300
        )
        names = {call.function.name for one in chat.choices for call in one.message.tool_calls or ()}  # type: ignore[union-attr]
        assert names == {"weather", "now"}
    chat = await openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[odd], tool_choice="auto", n=10, seed=2, max_tokens=9
    )
    assert not any(one.message.tool_calls for one in chat.choices)


async def test_a_client_can_restrict_the_tools(openai: AsyncOpenAI) -> None:
    only: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    with pytest.raises(BadRequestError, match=r"tool_choice\.function is missing"):  # as in vLLM
        await openai.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": only}
        )
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    response = await openai.responses.create(model=MODEL, input="x", tools=FLAT_TOOLS, extra_body={"tool_choice": flat})
    assert {item.name for item in response.output if item.type == "function_call"} == {"now"}


async def test_chunks_without_news_are_left_out(openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=TOOLS,
        tool_choice="required",
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, usage = [chunk async for chunk in stream]
    assert usage.usage is not None
    assert len(chunks) < usage.usage.completion_tokens
    told = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert told[0] == {"role": "assistant", "content": ""}
    assert all(delta.get("tool_calls") or not delta.get("content") for delta in told[1:])
    begun = [call for delta in told[1:] for call in delta.get("tool_calls") or () if "id" in call]
    assert begun
    assert all(call["function"].get("arguments", "") == "" for call in begun)
    assert all(call["id"].startswith("chatcmpl-tool-") for call in begun)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_response_calls_tools(openai: AsyncOpenAI, choice: Any) -> None:
    for seed in range(4):
        asked = {"model": MODEL, "input": "hello", "tools": FLAT_TOOLS, "tool_choice": choice}
        response = await openai.responses.create(**asked, extra_body={"seed": seed})
        items = [item for item in response.output if item.type == "function_call"]
        assert items == response.output
        assert {item.status for item in items} == {"completed"}
        assert [set(json.loads(item.arguments)) for item in items] == [
            {"city"} if item.name == "weather" else set() for item in items
        ]
        async with openai.responses.stream(**asked, extra_body={"seed": seed}) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        told = [(item.name, item.arguments, item.status) for item in final.output if item.type == "function_call"]
        assert told == [(item.name, item.arguments, item.status) for item in items]
        for kind in ("output_item.added", "function_call_arguments.done", "output_item.done"):
            assert kinds.count(f"response.{kind}") == len(items)
        assert kinds[-1] == "response.completed"


async def test_a_response_without_a_call_is_a_message(openai: AsyncOpenAI) -> None:
    for output, kind in (("plain words", "message"), ('[{"name": "now", "parameters": {}}]', "function_call")):
        asked = {"model": MODEL, "input": "hello", "tools": FLAT_TOOLS, "extra_body": {"mock_output": output}}
        response = await openai.responses.create(**asked)
        assert [item.type for item in response.output] == [kind]
        async with openai.responses.stream(**asked) as stream:
            [event async for event in stream]
            assert [item.type for item in (await stream.get_final_response()).output] == [kind]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_message_of_anthropics_calls_tools(cluster: LocalCluster, choice: dict[str, str]) -> None:
    for seed in range(4):
        asked = {"model": MODEL, "messages": HELLO, "max_tokens": 500, "seed": seed}
        asked |= {"tools": THEIR_TOOLS, "tool_choice": choice}
        whole = json_of(await exchange(cluster, "POST", "/v1/messages", asked))
        assert whole["stop_reason"] == "tool_use"
        assert {block["type"] for block in whole["content"]} == {"tool_use"}
        called = [(block["name"], block["input"]) for block in whole["content"]]
        assert all(set(given) == ({"city"} if name == "weather" else set()) for name, given in called)
        blocks: list[tuple[str, str]] = []
        events = unchunked(await exchange(cluster, "POST", "/v1/messages", {**asked, "stream": True})).decode()
        for line in events.split("\n"):
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if event.get("type") == "content_block_start":
                assert event["index"] == len(blocks)
                assert event["content_block"]["input"] == {}
                blocks.append((event["content_block"]["name"], ""))
            elif event.get("type") == "content_block_delta":
                blocks[event["index"]] = (blocks[-1][0], blocks[-1][1] + event["delta"]["partial_json"])
            elif event.get("type") == "message_delta":
                assert event["delta"]["stop_reason"] == "tool_use"
        assert [(name, json.loads(given)) for name, given in blocks] == called
        assert events.count("event: content_block_stop") == len(blocks)


async def test_anthropics_other_ways_to_ask(cluster: LocalCluster) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 500}
    form = {"output_config": {"format": {"type": "json_schema", "schema": CITY}}}
    (block,) = json_of(await exchange(cluster, "POST", "/v1/messages", asked | form))["content"]
    assert block["type"] == "text"
    assert len(json.loads(block["text"])["city"]) > 2
    kinds = set[str]()
    for seed in range(20):
        free = json_of(await exchange(cluster, "POST", "/v1/messages", {**asked, "tools": THEIR_TOOLS, "seed": seed}))
        kinds |= {block["type"] for block in free["content"]}
    assert kinds == {"text", "tool_use"}
    single = {"tools": THEIR_TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    for seed in range(8):
        one = json_of(await exchange(cluster, "POST", "/v1/messages", {**asked, **single, "seed": seed}))
        assert len(one["content"]) == 1


async def test_llm_mocks_route_has_forms_too(cluster: LocalCluster) -> None:
    answer = await exchange(
        cluster, "POST", "/generate", {"prompt": "x ", "max_tokens": 9, "structured_outputs": {"choice": ["y"]}}
    )
    assert json_of(answer) == {"text": ["x y"]}


@pytest.mark.parametrize(
    ("asked", "param", "why"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "has no json_schema; its type json_schema needs one",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "text, json_object or json_schema"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs", "no grammar"),
        ({"structured_outputs": {"regex": 3}}, "body.structured_outputs.regex", "Input should be a valid string"),
        ({"structured_outputs": {"choice": [3]}}, "body.structured_outputs.choice.0", "Input should be a valid string"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "has regex and choice; give one",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is no JSON"),
        (
            {"structured_outputs": {"json": '{"type": "number", "minimum": 1e999}'}},
            "structured_outputs.json",
            "beyond the range of numbers",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
            "is missing",
        ),
        ({"structured_outputs": {"json": '{"minimum": NaN}'}}, "structured_outputs.json", "NaN is no number"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json", "nested too deeply"),
        ({"structured_outputs": {"regex": "a"}, "mock_output": "a"}, "mock_output", "two forms"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "none, auto, required, or a function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "not among",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
                "tool_choice": "required",
            },
            "tools",
            "two types at once",
        ),
    ],
)
async def test_what_is_not_to_be_had_is_refused_with_the_field_and_the_reason(
    openai: AsyncOpenAI, asked: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(BadRequestError, match=why) as refused:
        await openai.chat.completions.create(model=MODEL, messages=HELLO, extra_body=asked)
    assert refused.value.param == param
    assert param.removeprefix("body.").partition(".")[0] in refused.value.message


async def test_a_stream_is_refused_before_it_begins(cluster: LocalCluster) -> None:
    asked = {"messages": HELLO, "stream": True, "structured_outputs": {"regex": "("}}
    assert status_of(await exchange(cluster, "POST", "/v1/chat/completions", asked)) == 400


async def test_log_probabilities_of_characters_in_several_tokens(openai: AsyncOpenAI) -> None:
    text = "naïve 😀 世"
    given = {"structured_outputs": {"choice": [text]}}
    chat = (
        await openai.chat.completions.create(
            model="", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1, extra_body=given
        )
    ).choices[0]
    assert chat.logprobs is not None
    content = chat.logprobs.content or []
    assert b"".join(bytes(one.bytes or ()) for one in content) == f"{text}</s>".encode()
    assert [(one.token, one.bytes) for one in content[2:4]] == [("", []), ("ï", [195, 175])]
    whole = (await openai.completions.create(model="", prompt="é", max_tokens=9, logprobs=1, extra_body=given)).choices[
        0
    ]
    assert whole.text == "naïve "  # the ninth token is the third byte of the emoji
    assert whole.logprobs is not None
    assert whole.logprobs.text_offset == [0, 1, 2, 2, 3, 4, 5, 6, 6]
