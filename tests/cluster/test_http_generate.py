"""The routes `/generate` and `/generate_stream`: S-LoRA's, byte for byte, and llm-mock's."""

import itertools
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from lorrery.service.local.cluster import LocalCluster
from lorrery.tokenizer.file import BuiltinTokenizer
from tests.cluster.client import Ask
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster
from tests.cluster.http_client import exchange, json_of, status_of, text_of, unchunked

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all."""
    async with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
        await nothing_held(cluster)


async def test_slora_s_events_are_byte_for_byte_what_its_benchmark_reads(cluster: LocalCluster) -> None:
    body = {
        "model_dir": "huggyllama/llama-7b",
        "lora_dir": "lora-1",
        "inputs": "hello world",
        "parameters": {"do_sample": False, "ignore_eos": True, "max_new_tokens": 5},
    }
    events = unchunked(await exchange(cluster, "POST", "/generate_stream", body)).split(b"\n\n")
    assert events.pop() == b""
    contents = [json.loads(event.removeprefix(b"data:")) for event in events]
    assert events[0] == b"data:" + json.dumps(contents[0]).encode()
    assert list(contents[0]) == ["token", "generated_text", "finished", "details"]
    assert list(contents[0]["token"]) == ["id", "text", "logprob", "special"]
    assert [content["finished"] for content in contents] == [*[False] * (len(contents) - 1), True]

    whole = json_of(await exchange(cluster, "POST", "/generate", body))
    assert whole["count_output_tokens"] == 5
    assert list(whole) == ["generated_text", "count_output_tokens"]
    body["parameters"]["return_details"] = True
    detailed = json_of(await exchange(cluster, "POST", "/generate", body))
    assert detailed["generated_text"] == ["".join(token["text"] for token in detailed["tokens"])]
    assert {token["logprob"] for token in detailed["tokens"]} == {content["token"]["logprob"] for content in contents}
    prompt_tokens = len(BuiltinTokenizer().encode_prompt("hello world"))
    assert {token["prompt_tokens"] for token in detailed["tokens"]} == {prompt_tokens}


async def test_an_adapter_may_be_named_as_tgi_does(cluster: LocalCluster) -> None:
    known = {"inputs": "hello world", "parameters": {"max_new_tokens": 5, "adapter_id": "lora-1"}}
    assert json_of(await exchange(cluster, "POST", "/generate", known))["generated_text"]
    unknown = {"inputs": "hello world", "parameters": {"adapter_id": "nobody"}}
    error = json_of(await exchange(cluster, "POST", "/generate", unknown))
    assert error["error"]["message"].startswith("parameters.adapter_id 'nobody' is not known; see GET /v1/models")


async def test_the_published_request_runs_as_written_once_its_adapter_is_loaded(cluster: LocalCluster) -> None:
    name = "tloen/alpaca-lora-7b-1"
    parameters = {"do_sample": False, "ignore_eos": False, "max_new_tokens": 205}
    body = {"model_dir": "huggyllama/llama-7b", "lora_dir": name, "inputs": "hello world", "parameters": parameters}
    assert status_of(await exchange(cluster, "POST", "/generate_stream", body)) == 404
    await exchange(cluster, "POST", "/v1/load_lora_adapter", {"lora_name": name, "rank": 16})
    *events, end = unchunked(await exchange(cluster, "POST", "/generate_stream", body)).split(b"\n\n")
    assert end == b""
    assert json.loads(events[-1].removeprefix(b"data:"))["finished"] is True
    await exchange(cluster, "POST", "/v1/unload_lora_adapter", {"lora_name": name})


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    ("wrong", "status", "param", "message"),
    [
        ({"lora_dir": "nobody"}, 404, "lora_dir", "lora_dir 'nobody' is not known; see GET /v1/models"),
        ({"lora_dir": "no body"}, 400, "lora_dir", "lora_dir "),
        ({"inputs": "x" * 10**6}, 400, "inputs", "inputs has 1000000 bytes; max_req_input_len is "),
        ({"req_id": "x" * 10**4}, 400, "req_id", "req_id has 10000 characters"),
        ({"parameters": {"max_new_tokens": 0}}, 400, "parameters.max_new_tokens", "max_new_tokens"),
        ({"parameters": {"stop_sequences": ""}}, 400, "parameters.stop_sequences[0]", "stop_sequences[0] is empty; "),
    ],
)
async def test_slora_s_errors_name_its_fields(
    cluster: LocalCluster, path: str, wrong: dict[str, object], status: int, param: str, message: str
) -> None:
    answer = await exchange(cluster, "POST", path, {"inputs": "hello world", **wrong})
    error = json_of(answer)["error"]
    assert (status_of(answer), error["param"]) == (status, param)
    assert error["message"].startswith(message)


async def test_llm_mock_s_errors_name_its_fields(cluster: LocalCluster) -> None:
    for wrong, param in (({"model": "nobody"}, "model"), ({"stop": ""}, "stop"), ({"stop": [""]}, "stop")):
        error = json_of(await exchange(cluster, "POST", "/generate", {"prompt": "x", **wrong}))["error"]
        assert error["param"] == param
        assert param in error["message"]


async def test_llm_mock_s_generate_has_the_prompt_in_its_text(cluster: LocalCluster) -> None:
    text = text_of(cluster, Ask(seed=4, max_new_tokens=5))
    body = {"prompt": "hello world", "max_tokens": 5, "seed": 4, "ignore_eos": True, "best_of": 1, "n": 1}
    body |= {"use_beam_search": False, "temperature": 1.0, "top_p": 1.0}
    whole = json_of(await exchange(cluster, "POST", "/generate", body))
    assert whole == {"text": [f"hello world{text}"]}
    *chunks, rest = unchunked(await exchange(cluster, "POST", "/generate", {**body, "stream": True})).split(b"\0")
    assert rest == b""
    texts = [json.loads(chunk)["text"][0] for chunk in chunks]
    assert texts[-1] == f"hello world{text}"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    two = json_of(await exchange(cluster, "POST", "/generate", {**body, "n": 2, "best_of": 2}))["text"]
    assert two == [f"hello world{text}", f"hello world{text_of(cluster, Ask(seed=5, max_new_tokens=5))}"]
    for wrong in ({}, {"prompt": "x", "use_beam_search": True}, {"prompt": "", "stream": True}, {"inputs": 5}):
        assert status_of(await exchange(cluster, "POST", "/generate", wrong)) == 400
