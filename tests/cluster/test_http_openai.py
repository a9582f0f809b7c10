"""OpenAI's routes before OpenAI's own package: completions, chat, models, adapters, and how errors look."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster
from tests.cluster.http_client import PROMPT, exchange, json_of, status_of, text_of, unchunked

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all."""
    async with running_cluster(tmp_path_factory.mktemp("cluster"), "router.request_faults=true") as cluster:
        yield cluster
        await nothing_held(cluster)


async def test_models_are_the_base_first_and_then_the_adapters(openai: AsyncOpenAI) -> None:
    models = (await openai.models.list()).data
    assert [model.id for model in models] == ["Llama-3-8B", "lora-0", "lora-1", "lora-2", "lora-3", "big"]
    extra = [model.model_extra or {} for model in models]
    assert [one["root"] for one in extra] == [model.id for model in models]
    assert [one["parent"] for one in extra] == [None, *["Llama-3-8B"] * 5]
    assert extra[0]["max_model_len"] == 4096


@pytest.mark.parametrize("model", ["Llama-3-8B", "lora-2"])
async def test_a_completion_is_what_grpc_gives(cluster: LocalCluster, openai: AsyncOpenAI, model: str) -> None:
    ask = Ask(seed=11, adapter_id="" if model == "Llama-3-8B" else model, max_new_tokens=12)
    answer = await openai.completions.create(
        model=model, prompt=PROMPT, max_tokens=12, seed=11, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (text_of(cluster, ask), "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 12, 20)


@pytest.mark.timing  # a router that falls behind sends several tokens at once
async def test_a_stream_has_a_token_a_chunk_and_its_finish_reason_on_the_last(
    cluster: LocalCluster, openai: AsyncOpenAI
) -> None:
    stream = await openai.chat.completions.create(
        model="lora-1",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        max_completion_tokens=20,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    *tokens, usage = chunks
    deltas = [chunk.choices[0].delta for chunk in tokens]
    text = text_of(cluster, Ask(seed=3, adapter_id="lora-1", max_new_tokens=20))
    assert "".join(delta.content or "" for delta in deltas) == text
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert deltas[0].content == ""
    assert len(deltas) == 21  # one for each token behind that
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [*[None] * (len(tokens) - 1), "length"]
    assert all(chunk.usage is None for chunk in tokens)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 20
    assert usage.usage.prompt_tokens_details is not None
    assert usage.usage.prompt_tokens_details.cached_tokens == 0


async def test_several_prompts_and_outputs_come_as_choices_in_order(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    def expected(seed: int) -> str:
        return text_of(cluster, Ask(seed=seed, max_new_tokens=6))

    prompts = [PROMPT, PROMPT[:4]]
    answer = await openai.completions.create(
        model="Llama-3-8B", prompt=prompts, n=2, seed=20, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, expected(20 + i)) for i in range(4)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 24)

    stream = await openai.completions.create(
        model="Llama-3-8B", prompt=prompts, n=2, seed=20, max_tokens=6, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [""] * 4
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [expected(20 + i) for i in range(4)]


async def test_equal_greedy_requests_have_equal_answers(openai: AsyncOpenAI) -> None:
    async def texts(model: str, **fields: Any) -> list[str]:
        answer = await openai.completions.create(model=model, prompt=PROMPT, max_tokens=8, **fields)
        return [choice.text for choice in answer.choices]

    base, adapter = "Llama-3-8B", "lora-1"
    greedy = await texts(base, temperature=0)
    assert await texts(base, temperature=0) == greedy != await texts(adapter, temperature=0)
    assert await texts(base, temperature=0, seed=1) != greedy
    assert await texts(base) != await texts(base)


async def test_output_ends_before_a_stop_string(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    words = text_of(cluster, Ask(seed=8, max_new_tokens=30)).split()
    answer = await openai.completions.create(
        model="Llama-3-8B", prompt=PROMPT, seed=8, max_tokens=30, stop=f" {words[9]}", extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.split() == words[: words.index(words[9])]


async def test_fields_that_are_unknown_or_null_are_passed_over(cluster: LocalCluster) -> None:
    nulls = ("stop", "seed", "temperature", "top_p", "logprobs", "stream", "user", "suffix", "stream_options", "echo")
    body = dict.fromkeys(nulls) | {"prompt": PROMPT, "max_tokens": 2, "repetition_penalty": 1.0, "best_of": 1}
    assert status_of(await exchange(cluster, "POST", "/v1/completions", body)) == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param"),
    [
        ("completions", {"model": "nobody", "prompt": PROMPT}, 404, "NotFoundError", "model"),
        ("completions", {"model": "no body", "prompt": PROMPT}, 404, "NotFoundError", "model"),
        ("completions", {"prompt": PROMPT, "max_tokens": 5000}, 400, "BadRequestError", "max_tokens"),
        ("completions", {"prompt": []}, 400, "BadRequestError", "prompt"),
        ("completions", {"prompt": {"a": 1}}, 400, "Bad Request", "body.prompt"),
        ("chat/completions", {"messages": [{"role": 5}]}, 400, "Bad Request", "body.messages.0.role"),
        ("completions", {"prompt": PROMPT, "top_p": 3}, 400, "BadRequestError", "top_p"),
        ("completions", {"prompt": PROMPT, "n": 2000}, 400, "BadRequestError", "n"),
        ("completions", {"prompt": [PROMPT] * 1000, "n": 2}, 400, "BadRequestError", "n"),
        ("completions", {"prompt": [PROMPT] * 1025, "n": 2}, 400, "BadRequestError", "prompt"),
        ("completions", {"prompt": [PROMPT] * 1025}, 400, "BadRequestError", "prompt"),
        ("completions", {"prompt": [2**40]}, 400, "BadRequestError", "prompt"),
        ("completions", {"prompt": PROMPT, "stop": [""]}, 400, "BadRequestError", "stop"),
        ("completions", {"prompt": PROMPT, "stop": ""}, 400, "BadRequestError", "stop"),
        ("completions", {"prompt": [5, 999_999_999]}, 400, "BadRequestError", "prompt"),
        ("completions", b"{", 400, "Bad Request", "body.1"),
        ("completions", b'{"prompt": "\\ud800"}', 400, "BadRequestError", None),
        ("load_lora_adapter", b'{"lora_name": "\\ud800", "rank": 8}', 400, "BadRequestError", None),
        ("completions", b'{"prompt": "x", "model": "\\ud800"}', 404, "NotFoundError", "model"),
        ("chat/completions", {"messages": []}, 400, "BadRequestError", "messages"),
        ("load_lora_adapter", {"lora_name": "new", "rank": 0}, 400, "InvalidUserInput", None),
        ("load_lora_adapter", {"lora_name": "new"}, 400, "Bad Request", "body.lora_path"),
        ("load_lora_adapter", {"rank": 8}, 400, "Bad Request", "body.lora_name"),
        ("load_lora_adapter", {"lora_name": "new", "lora_path": "/nowhere"}, 404, "NotFoundError", None),
        ("load_lora_adapter", {"lora_name": "lora-0", "rank": 16}, 400, "InvalidUserInput", None),
        ("unload_lora_adapter", {"lora_name": "nobody"}, 404, "NotFoundError", None),
        ("unload_lora_adapter", {}, 400, "Bad Request", "body.lora_name"),
    ],
)
async def test_errors_before_a_stream_have_a_status_and_openai_s_shape(
    cluster: LocalCluster, path: str, body: Any, status: int, kind: str, param: str | None
) -> None:
    for stream in (False, True):
        if isinstance(body, dict):
            body = body | {"stream": stream}
        answer = await exchange(cluster, "POST", f"/v1/{path}", body)
        error = json_of(answer)["error"]
        assert status_of(answer) == status
        assert error == {"message": error["message"], "type": kind, "param": param, "code": status}
        assert 0 < len(error["message"]) < 300


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405)],
)
async def test_what_is_no_route_has_fastapis_answer(cluster: LocalCluster, method: str, path: str, status: int) -> None:
    answer = await exchange(cluster, method, path, {} if method == "POST" else None)
    phrase = {404: "Not Found", 405: "Method Not Allowed"}[status]
    assert (status_of(answer), json_of(answer)) == (status, {"detail": phrase})


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": PROMPT, "stop": ["", "a"]}, "stop is empty; "),
        ("completions", {"prompt": PROMPT, "stop": ""}, "stop is empty; "),
        ("completions", {"prompt": [999_999_999]}, "prompt has token 999999999; the vocabulary has "),
        (
            "completions",
            {"prompt": PROMPT, "max_tokens": 5000},
            "max_tokens=5000 cannot be greater than max_model_len=4096",
        ),
        (
            "load_lora_adapter",
            {"lora_name": "Llama-3-8B", "rank": 8},
            "The lora adapter 'Llama-3-8B' conflicts with a served base model.",
        ),
        ("unload_lora_adapter", {"lora_name": "Llama-3-8B"}, "The lora adapter 'Llama-3-8B' cannot be found."),
    ],
)
async def test_errors_name_fields_as_the_client_does(
    cluster: LocalCluster, path: str, body: dict[str, Any], message: str
) -> None:
    error = json_of(await exchange(cluster, "POST", f"/v1/{path}", body))["error"]
    assert message in error["message"]
    assert "leave it empty" not in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("max_tokens", -1, "max_tokens is -1; it must be at least 1"),
        ("max_tokens", -(10**4_000), f"is -1{'0' * 98}...; it must be"),
        ("n", "x" * 200, f"got '{'x' * 100}'..."),
        ("echo", [1] * 500, "got an array of 500"),
        ("stop", True, "got true"),
    ],
)
async def test_an_error_says_what_stood_in_the_field(cluster: LocalCluster, field: str, value: Any, shown: str) -> None:
    answer = await exchange(cluster, "POST", "/v1/completions", {"prompt": PROMPT, field: value})
    assert shown in json_of(answer)["error"]["message"]


async def test_openai_s_client_raises_its_own_errors(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        await openai.completions.create(model="nobody", prompt="hello")
    with pytest.raises(BadRequestError, match="top_p"):
        await openai.completions.create(model="lora-0", prompt="hello", top_p=2.0)


async def test_an_error_within_a_stream_is_an_event_of_it(cluster: LocalCluster) -> None:
    body = {"prompt": PROMPT, "max_tokens": 50, "stream": True, "ignore_eos": True}
    answer = await exchange(cluster, "POST", "/v1/completions", body, "lorrery-fault: cut,after=3")
    *_, error, done, rest = unchunked(answer).split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 503
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_of_ten_loads_of_one_name_at_once_one_succeeds_and_in_place_all(cluster: LocalCluster) -> None:
    async def statuses(**fields: Any) -> list[int]:
        body = {"lora_name": "often", "rank": 8, **fields}
        loads = (exchange(cluster, "POST", "/v1/load_lora_adapter", body) for _ in range(10))
        return sorted(status_of(answer) for answer in await asyncio.gather(*loads))

    assert await statuses() == [200] + [400] * 9
    assert await statuses(load_inplace=True) == [200] * 10
    assert await statuses(load_inplace=True, rank=16) == [200] * 10
    again = await exchange(cluster, "POST", "/v1/load_lora_adapter", {"lora_name": "often", "rank": 16})
    error = json_of(again)["error"]
    assert (error["code"], error["type"]) == (400, "InvalidUserInput")
    assert "The lora adapter 'often' has already been loaded." in error["message"]
    await exchange(cluster, "POST", "/v1/unload_lora_adapter", {"lora_name": "often"})


async def test_no_request_misses_an_adapter_that_is_loaded_in_place(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    body = {"lora_name": "steady", "rank": 8}
    await exchange(cluster, "POST", "/v1/load_lora_adapter", body)
    reloading = True

    async def ask() -> None:
        while reloading:
            await openai.completions.create(model="steady", prompt=PROMPT, max_tokens=2)

    async with asyncio.TaskGroup() as asking:
        for _ in range(4):
            asking.create_task(ask())
        for number in range(20):
            in_place = {**body, "rank": 8 + number % 2, "load_inplace": True}
            assert status_of(await exchange(cluster, "POST", "/v1/load_lora_adapter", in_place)) == 200
        too_large = await exchange(cluster, "POST", "/v1/load_lora_adapter", {**in_place, "rank": 65})
        assert (status_of(too_large), json_of(too_large)["error"]["type"]) == (400, "InvalidUserInput")
        reloading = False
    await openai.completions.create(model="steady", prompt=PROMPT, max_tokens=2)
    await exchange(cluster, "POST", "/v1/unload_lora_adapter", {"lora_name": "steady"})


async def test_adapters_come_and_go(cluster: LocalCluster, openai: AsyncOpenAI) -> None:
    body = {"lora_name": "late", "rank": 8}
    loaded = await exchange(cluster, "POST", "/v1/load_lora_adapter", body)
    assert status_of(loaded) == 200
    assert loaded.endswith(b"Success: LoRA adapter 'late' added successfully.")
    in_place = await exchange(cluster, "POST", "/v1/load_lora_adapter", {**body, "rank": 4, "load_inplace": True})
    assert status_of(in_place) == 200
    card = await openai.models.retrieve("late")
    assert (card.id, (card.model_extra or {})["parent"]) == ("late", "Llama-3-8B")
    answer = await openai.completions.create(model="late", prompt=PROMPT, max_tokens=3, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    unloaded = await exchange(cluster, "POST", "/v1/unload_lora_adapter", {"lora_name": "late"})
    assert status_of(unloaded) == 200
    with pytest.raises(NotFoundError):
        await openai.completions.create(model="late", prompt=PROMPT)
    with pytest.raises(NotFoundError, match="The model 'late' does not exist"):
        await openai.models.retrieve("late")
