"""Messages made to hurt: each is refused or served within its bounds, and the streams beside it do not notice."""

import random

import grpc
import pytest

from lorrery.v1 import router_pb2, types_pb2
from tests.cluster.client import TIMEOUT_SECONDS, Client

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

LIMITED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(
    ("prompt_tokens", "token_id", "code", "words"),
    [
        # One byte a token: under the 4 MiB that the router takes in one message, and over them.
        (4_000_000, 3, grpc.StatusCode.INVALID_ARGUMENT, "4000000 is too long > 2048"),
        (17_000_000, 3, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
        (17_000_000, 100_000, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
async def test_prompts_of_millions_of_token_ids(
    attacked: Client, prompt_tokens: int, token_id: int, code: grpc.StatusCode, words: str
) -> None:
    request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[token_id] * prompt_tokens))
    for _ in range(3):
        answer = await attacked.failure(request)
        assert answer[0] == code
        assert words in answer[1]


@pytest.mark.parametrize("characters", [30_000, 3_000_000, 30_000_000])
async def test_prompts_of_megabytes_of_text(attacked: Client, characters: int) -> None:
    for text in ("x" * characters, "\U0001f9a0" * (characters // 4), " \n" * (characters // 2)):
        code, message = await attacked.failure(router_pb2.GenerateRequest(text=text))
        assert code in LIMITED, message


async def test_names_and_metadata_of_megabytes(attacked: Client) -> None:
    for field in ("adapter_id", "tenant_id", "request_id", "model"):
        code, message = await attacked.failure(router_pb2.GenerateRequest(text="hello", **{field: "x" * 3_000_000}))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith(f"{field} has 3000000 characters; at most 512 are allowed")
    # As long and as wide as a name may be: the status that repeats it has to fit a header.
    code, message = await attacked.failure(router_pb2.GenerateRequest(text="hello", adapter_id="\U0001f9a0" * 512))
    assert (code, message[:10]) == (grpc.StatusCode.NOT_FOUND, "adapter_id")
    for value in ("x" * 20_000, "x" * 1_000_000):
        call = attacked.stub.Generate(
            router_pb2.GenerateRequest(text="hello"), metadata=(("tenant", value),), timeout=TIMEOUT_SECONDS
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_sixty_requests_with_twenty_thousand_stop_strings_each(attacked: Client) -> None:
    stops = [chr(33 + index % 90) for index in range(20_480)]
    request = router_pb2.GenerateRequest(text="hello", sampling=types_pb2.SamplingParams(stop_sequences=stops))
    for _ in range(60):
        code, message = await attacked.failure(request)
        assert (code, message) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "stop_sequences has 20480 strings; max_stop_strings is 64; give fewer",
        )


async def test_sixty_requests_with_all_the_stop_strings_that_are_allowed(attacked: Client) -> None:
    rng = random.Random(1)
    calls = []
    for seed in range(60):
        stops = ["".join(chr(rng.randrange(97, 123)) for _ in range(64)) for _ in range(64)]
        request = router_pb2.GenerateRequest(
            text="hello",
            seed=seed,
            sampling=types_pb2.SamplingParams(stop_sequences=stops, max_new_tokens=200, ignore_eos=True),
        )
        calls.append(attacked.stub.Generate(request, timeout=TIMEOUT_SECONDS))
    for call in calls:
        messages = [message async for message in call]
        assert messages[-1].finish.usage.completion_tokens == 200
