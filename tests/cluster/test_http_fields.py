"""What OpenAI's and vLLM's fields do: those that are honoured show, the others are refused with a reason."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError

from lorrery.router.logprobs import NEVER
from lorrery.service.local.cluster import LocalCluster
from lorrery.tokenizer.base import BOS_ID, NUM_WORDS
from lorrery.tokenizer.file import BuiltinTokenizer
from tests.cluster.client import Ask
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

MODEL = "Llama-3-8B"
TOKENIZER = BuiltinTokenizer()
WORD = -math.log(NUM_WORDS)
EXACT = {"ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all, in which tokens come soon."""
    async with running_cluster(tmp_path_factory.mktemp("cluster"), "time_scale=0.1") as cluster:
        yield cluster
        await nothing_held(cluster)


def tokens_of(cluster: LocalCluster, seed: int, max_new_tokens: int) -> list[int]:
    return Ask(seed=seed, max_new_tokens=max_new_tokens).expected(cluster.settings)[0]


def text_of(token_ids: list[int]) -> str:
    return "".join(TOKENIZER.detokenizer().push((token_id,)) for token_id in token_ids)


@pytest.mark.parametrize("further", [{}, {"logprobs": 1}, {"echo": True}])
async def test_each_chunk_of_a_completion_has_the_usage_so_far(openai: AsyncOpenAI, further: dict[str, Any]) -> None:
    prompts = ["about able", "about"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await openai.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=5, stream=True, stream_options=options, extra_body=EXACT, **further
    )
    *chunks, last = [chunk async for chunk in stream]
    for index in range(4):
        own = [chunk for chunk in chunks if chunk.choices[0].index == index]
        so_far = [chunk.usage.completion_tokens for chunk in own if chunk.usage is not None]
        assert len(so_far) == len(own)
        assert so_far == sorted(so_far)
        assert so_far[-1] == 5
        prompt_tokens = len(TOKENIZER.encode_prompt(prompts[index // 2]))
        for chunk in own:
            assert chunk.usage is not None
            assert chunk.usage.prompt_tokens == prompt_tokens
            assert chunk.usage.total_tokens == prompt_tokens + chunk.usage.completion_tokens
    assert last.usage is not None
    assert (last.choices, last.usage.completion_tokens) == ([], 20)


async def test_each_chunk_of_a_chat_has_the_usage_so_far_only_where_the_last_has_the_whole(openai: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}

    async def usages(**options: bool) -> list[Any]:
        stream = await openai.chat.completions.create(**asked, stream=True, stream_options=options, extra_body=EXACT)
        return [chunk.usage async for chunk in stream]

    *so_far, last = await usages(include_usage=True, continuous_usage_stats=True)
    assert so_far[-1].completion_tokens == last.completion_tokens == 6
    assert {usage.prompt_tokens for usage in so_far} == {last.prompt_tokens}
    assert set(await usages(include_usage=False, continuous_usage_stats=True)) == {None}  # as in vLLM
    *none, _ = await usages(include_usage=True)
    assert set(none) == {None}


async def test_completions_have_log_probabilities_in_one_piece_and_in_a_stream(
    cluster: LocalCluster, openai: AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 6, "seed": 5, "logprobs": 3}
    token_ids = tokens_of(cluster, 5, 6)
    (choice,) = (await openai.completions.create(**asked, extra_body=EXACT)).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == [text_of([token_id]) for token_id in token_ids]
    assert "".join(logprobs.tokens or ()) == choice.text
    assert logprobs.token_logprobs == [pytest.approx(WORD)] * 6
    assert [len(top) for top in logprobs.top_logprobs or ()] == [3] * 6
    assert all(token in top for token, top in zip(logprobs.tokens or (), logprobs.top_logprobs or (), strict=True))
    assert logprobs.text_offset == [sum(map(len, (logprobs.tokens or [])[:at])) for at in range(6)]
    streamed = [
        chunk.choices[0] async for chunk in await openai.completions.create(**asked, stream=True, extra_body=EXACT)
    ]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in streamed for one in getattr(part.logprobs, field)] == getattr(logprobs, field)
    names = (
        await openai.completions.create(**asked, extra_body={**EXACT, "return_tokens_as_token_ids": True})
    ).choices[0]
    assert names.logprobs is not None
    assert names.logprobs.tokens == [f"token_id:{token_id}" for token_id in token_ids]


async def test_chats_have_log_probabilities_in_one_piece_and_in_a_stream(
    cluster: LocalCluster, openai: AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {
        "model": "",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "seed": 9,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": EXACT,
    }
    (choice,) = (await openai.chat.completions.create(**asked)).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(one.token for one in content) == choice.message.content == text_of(tokens_of(cluster, 9, 5))
    assert [bytes(one.bytes or ()).decode() for one in content] == [one.token for one in content]
    assert [one.logprob for one in content] == [pytest.approx(WORD)] * 5
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].token == one.token for one in content)
    streamed = [
        one
        async for chunk in await openai.chat.completions.create(**asked, stream=True)
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else None) or ()
    ]
    assert streamed == content
    with pytest.raises(BadRequestError, match="needs logprobs"):
        await openai.chat.completions.create(**{**asked, "logprobs": False})


async def test_an_echo_is_the_prompt_before_the_output(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    prompt_ids = TOKENIZER.encode_prompt("about able")
    output = text_of(tokens_of(cluster, 3, 4))
    asked: dict[str, Any] = {"model": MODEL, "prompt": "about able", "seed": 3, "max_tokens": 4, "echo": True}
    answer = await openai.completions.create(**asked, logprobs=1, n=2, extra_body=EXACT)
    assert [choice.text for choice in answer.choices] == [
        f"about able{output}",
        f"about able{text_of(tokens_of(cluster, 4, 4))}",
    ]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or ()) == f"<s>about able{output}"
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[:3] == [0, 0, 1]
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert logprobs.token_logprobs[-5:] == [pytest.approx(WORD)] * 5
    assert len((answer.choices[0].model_extra or {})["prompt_logprobs"]) == len(prompt_ids)
    as_ids = await openai.completions.create(**asked, extra_body={**EXACT, "return_token_ids": True})
    assert as_ids.choices[0].text == output  # as in vLLM: the prompt is in its tokens
    assert (as_ids.choices[0].model_extra or {})["prompt_token_ids"] == prompt_ids
    assert (as_ids.choices[0].model_extra or {})["token_ids"] == tokens_of(cluster, 3, 4)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt_ids), 8)
    chunks = [chunk async for chunk in await openai.completions.create(**asked, stream=True, extra_body=EXACT)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"about able{output}"
    assert (chunks[0].choices[0].model_extra or {})["prompt_token_ids"] == prompt_ids
    alone = await openai.completions.create(**{**asked, "max_tokens": 0}, logprobs=0)
    assert alone.choices[0].text == "about able"
    assert alone.choices[0].logprobs is not None
    assert len(alone.choices[0].logprobs.tokens or ()) == len(prompt_ids)
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 1  # as in vLLM


async def test_prompts_have_log_probabilities_of_their_own(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(
        model=MODEL, prompt=" about able", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    first, about, able = (answer.choices[0].model_extra or {})["prompt_logprobs"]
    assert first is None
    for one, token_id, text in ((about, *_word(" about")), (able, *_word(" able"))):
        assert one[str(token_id)] == {"logprob": pytest.approx(WORD), "rank": 1, "decoded_token": text}
    chat = await openai.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=1,
        extra_body={"prompt_logprobs": 0, "return_token_ids": True},
    )
    beside = chat.model_extra or {}
    assert beside["prompt_token_ids"][0] == BOS_ID
    assert len(beside["prompt_logprobs"]) == len(beside["prompt_token_ids"])
    assert {one["logprob"] for entry in beside["prompt_logprobs"][1:] for one in entry.values()} <= {NEVER, WORD}


def _word(text: str) -> tuple[int, str]:
    (token_id,) = TOKENIZER.encode_stop(text)
    return token_id, text


async def test_least_lengths_stop_tokens_and_stop_strings_that_stay(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    token_ids = tokens_of(cluster, 8, 30)
    words = text_of(token_ids).split()

    async def output(**fields: Any) -> tuple[str, str, int, object]:
        answer = await openai.completions.create(
            model=MODEL, prompt="x", seed=8, max_tokens=30, extra_body=EXACT | fields
        )
        assert answer.usage is not None
        (choice,) = answer.choices
        return choice.text, choice.finish_reason, answer.usage.completion_tokens, (choice.model_extra or {})[STOPPED]

    stop_token, stop = token_ids[9], f" {words[9]}"
    assert await output(stop_token_ids=[stop_token]) == (text_of(token_ids[:10]), "stop", 10, stop_token)
    shown = {"stop_token_ids": [stop_token], "logprobs": 1}
    assert await output(**shown) == (text_of(token_ids[:10]), "stop", 10, stop_token)
    stopped = {"stop": ["nowhere", stop], "include_stop_str_in_output": True}
    assert await output(**stopped) == (text_of(token_ids[:10]), "stop", 10, stop)
    assert await output(**stopped, min_tokens=10) == (text_of(token_ids), "length", 30, None)
    exact = await openai.completions.create(model=MODEL, prompt="x", max_tokens=40, extra_body={"min_tokens": 40})
    assert exact.usage is not None
    assert (exact.usage.completion_tokens, exact.choices[0].finish_reason) == (40, "length")


@pytest.mark.parametrize("logprobs", [None, True])
async def test_a_stream_says_what_stopped_it(cluster: LocalCluster, openai: AsyncOpenAI, logprobs: bool | None) -> None:
    token_ids = tokens_of(cluster, 8, 30)
    words = text_of(token_ids).split()
    for stop, shown in (({"stop": f" {words[9]}"}, f" {words[9]}"), ({"stop_token_ids": [token_ids[9]]}, token_ids[9])):
        stream = await openai.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "x"}],
            seed=8,
            max_tokens=30,
            stream=True,
            logprobs=logprobs,
            extra_body=EXACT | stop,
        )
        reasons = [(chunk.choices[0].model_extra or {}).get(STOPPED) async for chunk in stream]
        assert reasons == [*[None] * (len(reasons) - 1), shown]


async def test_ends_by_themselves_have_no_stop_reason(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(model=MODEL, prompt="x", seed=8, max_tokens=2000)
    assert (answer.choices[0].finish_reason, (answer.choices[0].model_extra or {})[STOPPED]) == ("stop", None)


async def test_wrong_combinations_name_the_limit(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="min_tokens is 10; it must be at most max_tokens, 2"):
        await openai.completions.create(model=MODEL, prompt="x", max_tokens=2, extra_body={"min_tokens": 10})
    with pytest.raises(BadRequestError, match="top_logprobs is 3; it needs logprobs: true"):
        await openai.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}], top_logprobs=3)


async def test_an_id_in_the_body_is_the_requests_unless_the_header_has_one(openai: AsyncOpenAI) -> None:
    async def ids(*, header: str | None, body: str) -> tuple[str, str]:
        answer = await openai.completions.with_raw_response.create(
            model=MODEL,
            prompt="x",
            max_tokens=1,
            extra_headers={} if header is None else {"x-request-id": header},
            extra_body={"request_id": body},
        )
        return answer.headers["x-request-id"], answer.parse().id

    assert await ids(header=None, body="mine") == ("mine", "cmpl-mine")
    assert await ids(header="other", body="mine") == ("other", "cmpl-other")
    header = "x??set-cookie: a=b?"  # none of the body's characters ends a header
    assert await ids(header=None, body="x\r\nset-cookie: a=b\u00e9") == (header, "cmpl-x\r\nset-cookie: a=b\u00e9")
    with pytest.raises(BadRequestError, match="request_id has 1000 characters"):
        await ids(header=None, body="x" * 1000)


async def test_a_chat_without_a_length_may_fill_the_context(openai: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    answer = await openai.chat.completions.create(model="", messages=messages, seed=1, extra_body={"min_tokens": 200})
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 200
    short = await openai.completions.create(model=MODEL, prompt="x", extra_body=EXACT)
    assert short.usage is not None
    assert short.usage.completion_tokens == 16


async def test_prompts_may_be_cut_and_have_no_special_tokens(openai: AsyncOpenAI) -> None:
    async def prompt_tokens(**fields: Any) -> int:
        answer = await openai.completions.create(model=MODEL, prompt=" about able", max_tokens=1, extra_body=fields)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert await prompt_tokens() == 3
    assert await prompt_tokens(add_special_tokens=False) == 2
    assert await prompt_tokens(truncate_prompt_tokens=1) == 1
    assert await prompt_tokens(truncate_prompt_tokens=-1) == 3


STOPPED = "stop_reason"
PASSED_OVER: dict[str, Any] = {
    "presence_penalty": -2.0,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_p": 0.1,
    "length_penalty": 2.0,
    "logit_bias": {"5": -100},
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "priority": 2**40,
    "best_of": 2,
    "functions": [{"name": "f"}],
    "guided_grammar": "root ::= x",
    "guided_regex": "(?=a)",
    "guided_json": {"type": "objekt"},
    "guided_choice": [],
    "modalities": ["text", "audio"],
    "bad_words": ["x"],
    "cache_salt": "pepper",
    "suffix": None,
    "response_format": {"type": "text"},
    "kv_transfer_params": {"do_remote_decode": True},
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "request_id": "x",
    "nobody_knows": [{}],
}
REFUSED: dict[str, Any] = {
    "suffix": "",
    "use_beam_search": True,
    "prompt_embeds": "AAAA",
    "priority": 2**63,
    "cache_salt": "a/b",
    "bad_words": [""],
    "allowed_token_ids": [],
    "stop_token_ids": [2**20],
    "logit_bias": {"x": 1},
    "logprob_token_ids": [5],
    "seed": 2**63,
    "top_p": 0,
    "stop": list("abcde"),
    "stream_options": {"include_usage": True},
    "logprobs": 21,
    "prompt_logprobs": 21,
    "min_tokens": 17,
    "presence_penalty": -2.1,
    "temperature": 2.1,
    "n": 0,
    "max_tokens": 0,
}
CHAT_REFUSED: dict[str, Any] = {
    "tool_choice": "required",
    "tools": [],
    "continue_final_message": True,
    "chat_template": "{{ messages }}",
    "stream_options": {"include_usage": False},
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    "chat_template_kwargs": [],
}


async def test_fields_without_a_meaning_here_are_passed_over(openai: AsyncOpenAI) -> None:
    plain = await openai.completions.create(model=MODEL, prompt="x", seed=2, max_tokens=3)
    answer = await openai.completions.create(model=MODEL, prompt="x", seed=2, max_tokens=3, extra_body=PASSED_OVER)
    assert answer.choices == plain.choices
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    kwargs = {"self": 2, "add_generation_prompt": 3, "enable_thinking": False}
    chat = await openai.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "x", "name": "somebody"}],
        max_tokens=3,
        extra_body={"tools": tools, "tool_choice": "auto", "chat_template_kwargs": kwargs, "parallel_tool_calls": True},
    )
    assert chat.choices[0].message.tool_calls is None


@pytest.mark.parametrize("name", [*REFUSED, *(f"chat {name}" for name in CHAT_REFUSED)])
async def test_what_is_not_to_be_had_is_refused_with_its_name(openai: AsyncOpenAI, name: str) -> None:
    if name.startswith("chat "):
        name = name.removeprefix("chat ")
        messages: Any = [{"role": "user", "content": "x"}]
        asked = openai.chat.completions.create(model="", messages=messages, extra_body={name: CHAT_REFUSED[name]})
    else:
        asked = openai.completions.create(model=MODEL, prompt="x", extra_body={name: REFUSED[name]})
    with pytest.raises(BadRequestError) as caught:
        await asked
    assert name in caught.value.message
