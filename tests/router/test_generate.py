"""One request through a router: what the scheduler is asked, what the client gets."""

import threading

import grpc
import grpc.aio
import pytest

from lorrery.router.checks import receive_bytes
from lorrery.service.names import MAX_QUOTED_CHARACTERS
from lorrery.tokenizer.file import BuiltinTokenizer
from lorrery.v1 import router_pb2, types_pb2
from tests.cluster.client import error_info
from tests.router.conftest import TIMEOUT_SECONDS, StartRouter, everything, failure, next_submit
from tests.router.fake_scheduler import from_u32

LENGTH = types_pb2.FINISH_REASON_LENGTH


async def test_a_prompt_travels_down_and_its_tokens_come_back_in_order(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate(
        " about above",
        adapter_id="lora-0",
        tenant_id="t1",
        request_id="r1",
        seed=7,
        true_output_tokens=5,
        priority=-3,
        sampling=types_pb2.SamplingParams(max_new_tokens=3, ignore_eos=True),
    )
    submit = await next_submit(route)
    assert submit.priority == -3
    assert (submit.request_id, submit.adapter_id, submit.tenant_id) == ("r1", "lora-0", "t1")
    assert from_u32(submit.prompt_token_ids_u32) == [1, 5, 6]
    assert submit.produced_token_ids_u32 == b""
    assert (submit.sampling.seed, submit.sampling.max_new_tokens, submit.sampling.ignore_eos) == (7, 3, True)
    assert submit.sampling.true_output_tokens == 5
    usage = types_pb2.Usage(
        prompt_tokens=3,
        completion_tokens=3,
        cached_tokens=1,
        queue_seconds=0.5,
        worker_id="w0",
        num_requeues=2,
        adapter_load_seconds=0.25,
        prefill_seconds=0.75,
        decode_seconds=2,
        waited_seconds=0.625,
    )
    route.send([(submit.handle, 3)])
    route.send([(submit.handle, 4)])
    route.send([(submit.handle, 5)], [(submit.handle, LENGTH)], usage=usage)
    token_ids, text, finish = await everything(call)
    assert token_ids == [3, 4, 5]
    assert text == " abc able about"
    assert finish == router_pb2.Finish(reason=LENGTH, usage=usage)
    assert await call.code() == grpc.StatusCode.OK
    await router.until_empty()
    assert route.cancelled == []
    assert router.sample("lorrery_router_requests_total", outcome="ok") == 1
    assert router.sample("lorrery_router_output_tokens_total") == 3
    assert router.sample("lorrery_router_prompt_tokens_total") == 3


async def test_token_ids_are_taken_as_they_are(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate(token_ids=router_pb2.TokenIds(ids=[9, 8, 2163]))
    submit = await next_submit(route)
    assert from_u32(submit.prompt_token_ids_u32) == [9, 8, 2163]
    route.send(finished=[(submit.handle, LENGTH)])
    assert (await everything(call))[:2] == ([], "")


async def test_seed_and_request_id_are_made_if_the_client_gives_none(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    calls = [router.generate() for _ in range(3)]
    submits = [await next_submit(route) for _ in calls]
    assert len({submit.request_id for submit in submits} - {""}) == 3
    assert len({submit.sampling.seed for submit in submits}) == 3
    assert len({submit.handle for submit in submits}) == 3
    for call in calls:
        call.cancel()
    await router.until_empty()


async def test_a_greedy_request_without_a_seed_has_that_of_its_prompt(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    greedy = types_pb2.SamplingParams(do_sample=False)
    prompts = [[9, 8, 2163], [9, 8, 2163], [9, 8, 2164], [9, 8]]

    async def seeds(**fields: object) -> list[int]:
        calls = [router.generate(token_ids=router_pb2.TokenIds(ids=ids), **fields) for ids in prompts]
        submits = [await next_submit(route) for _ in calls]
        for call in calls:
            call.cancel()
        return [submit.sampling.seed for submit in submits]

    by_prompt = sorted(await seeds(sampling=greedy))
    assert len(set(by_prompt)) == 3
    assert sorted(await seeds(sampling=greedy)) == by_prompt
    tiny = types_pb2.SamplingParams(do_sample=True, temperature=1e-6)
    assert sorted(await seeds(sampling=tiny)) == by_prompt
    assert await seeds(sampling=greedy, seed=5) == [5] * 4
    for drawn in ({}, {"sampling": types_pb2.SamplingParams(do_sample=True)}):
        assert len(set(await seeds(**drawn))) == 4
    await router.until_empty()


async def test_without_a_length_output_may_fill_what_the_prompt_leaves(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    call = router.generate(fill_context=True)
    assert (await next_submit(route)).sampling.max_new_tokens == 3072 - 2
    asked = router.generate(fill_context=True, sampling=types_pb2.SamplingParams(max_new_tokens=5))
    assert (await next_submit(route)).sampling.max_new_tokens == 5
    for one in (call, asked):
        one.cancel()
    await router.until_empty()


async def test_bad_input_never_reaches_the_scheduler(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    invalid, not_found = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    cases = [
        (router.generate(""), invalid, "prompt is empty; give text or token_ids"),
        (router.stub.Generate(router_pb2.GenerateRequest()), invalid, "prompt is empty; give text or token_ids"),
        (
            router.generate(token_ids=router_pb2.TokenIds()),
            invalid,
            "prompt is empty; give text or token_ids",
        ),
        (
            router.generate(sampling=types_pb2.SamplingParams(max_new_tokens=0)),
            invalid,
            "max_new_tokens must be at least 1 , got 0.",
        ),
        (
            router.generate(sampling=types_pb2.SamplingParams(do_sample=True, temperature=float("nan"))),
            invalid,
            "temperature must > 0.0, got nan",
        ),
        (
            router.generate(token_ids=router_pb2.TokenIds(ids=[3, 2**20 - 1, 2**20, 2**32 - 1])),
            invalid,
            "token_ids[2] is 1048576; the vocabulary has 1048576 tokens, so at most 1048575 is allowed",
        ),
        (router.generate(true_output_tokens=0), invalid, "true_output_tokens must be at least 1, got 0"),
        (
            router.generate(model="GPT 9"),
            not_found,
            (
                "The model 'GPT 9' does not exist; this cluster serves 'Llama-2-7B' and the adapters that ListAdapters"
                " lists"
            ),
        ),
    ]
    for call, code, message in cases:
        error = await failure(call)
        assert (error.code(), error.details()) == (code, message)
    await router.until_empty()
    assert route.num_submits == 0
    assert router.sample("lorrery_router_requests_total", outcome="invalid") == 7
    assert router.sample("lorrery_router_requests_total", outcome="not_found") == 1


@pytest.mark.parametrize("field", ["model", "adapter_id", "tenant_id", "request_id"])
async def test_a_name_that_is_too_long_is_refused_and_quoted_in_part(start_router: StartRouter, field: str) -> None:
    router = await start_router()
    message = router_pb2.GenerateRequest(text=" about")
    setattr(message, field, "x" * 513)
    error = await failure(router.stub.Generate(message))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        f"{field} has 513 characters; at most 512 are allowed; it begins '{'x' * MAX_QUOTED_CHARACTERS}'..."
    )


async def test_a_long_name_is_quoted_in_part(start_router: StartRouter) -> None:
    router = await start_router()
    error = await failure(router.generate(model=" " * 512))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert (error.details() or "").startswith(f"The model '{' ' * MAX_QUOTED_CHARACTERS}'... does not exist")


async def test_adapter_ids_of_operator_calls_have_the_same_limit(start_router: StartRouter) -> None:
    router = await start_router()
    adapter = types_pb2.Adapter(adapter_id="x" * 513, rank=8)
    for call in (
        router.stub.LoadAdapter(router_pb2.LoadAdapterRequest(adapter=adapter)),
        router.stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(adapter_id=adapter.adapter_id)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith("adapter_id has 513 characters; at most 512 are allowed")


@pytest.mark.parametrize("prompt", [{"token_ids": router_pb2.TokenIds(ids=[3] * 2049)}, {"text": " about" * 2048}])
async def test_a_prompt_over_the_limit_never_leaves_the_router(start_router: StartRouter, prompt: dict) -> None:
    router = await start_router()
    route = await router.route()
    error = await failure(router.stub.Generate(router_pb2.GenerateRequest(**prompt), timeout=TIMEOUT_SECONDS))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "the input prompt token len 2049 is too long > 2048 (max_req_input_len is 2048); give a shorter prompt"
    )
    reason, facts, _ = error_info(error)
    assert (reason, facts["prompt_tokens"], facts["max_new_tokens"]) == ("NEVER_FITS", "2049", "16")
    await router.until_empty()
    assert not route.num_submits


@pytest.mark.parametrize(
    ("max_req_input_len", "longest_token_bytes", "expected"),
    [
        (2048, 15, 4 << 20),  # gRPC's default
        (1_000_000, 3, 2 * (1_000_000 * 5 + 4096 + 65_536)),  # token ids take more bytes than text
        (1_000_000, 15, 2 * (1_000_000 * 15 + 4096 + 65_536)),
    ],
)
def test_the_largest_message_follows_from_the_longest_prompt(
    max_req_input_len: int, longest_token_bytes: int, expected: int
) -> None:
    assert receive_bytes(max_req_input_len, longest_token_bytes, 4096) == expected


async def test_a_text_that_can_never_fit_is_refused_before_it_is_encoded(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router()
    encoded: list[str] = []
    monkeypatch.setattr(BuiltinTokenizer, "encode_prompt", lambda _, given, **_further: encoded.append(given))
    error = await failure(router.generate("é" * 600_000))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    longest = BuiltinTokenizer().longest_token_bytes
    assert error.details() == (
        f"text has 1200000 bytes; max_req_input_len is 2048 tokens, which are {2048 * longest} bytes at most"
        f" (the longest token has {longest}); give a shorter one"
    )
    assert encoded == []


@pytest.mark.parametrize(
    ("stop_sequences", "message"),
    [
        (["x"] * 65, "stop_sequences has 65 strings; max_stop_strings is 64; give fewer"),
        (
            ["é" * 1500, "x" * 1097],
            "stop_sequences has 4097 bytes in all; max_stop_bytes is 4096; give fewer or shorter",
        ),
    ],
)
async def test_too_many_or_too_long_stop_strings_are_refused_before_they_are_encoded(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch, stop_sequences: list[str], message: str
) -> None:
    router = await start_router()
    encoded: list[str] = []
    monkeypatch.setattr(BuiltinTokenizer, "encode_stop", lambda _, given: encoded.append(given))
    error = await failure(router.generate(sampling=types_pb2.SamplingParams(stop_sequences=stop_sequences)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith(message)
    assert encoded == []


async def test_the_most_stop_strings_are_taken_and_each_counts_once(start_router: StartRouter) -> None:
    router = await start_router()
    route = await router.route()
    stops = [" about", *("é" * 1024, "x" * 500), *["!", "?"] * 30, "x" * 500]
    call = router.generate(sampling=types_pb2.SamplingParams(stop_sequences=stops))
    submit = await next_submit(route)
    assert len(submit.sampling.stop_sequences_u32) == 5
    call.cancel()
    await router.until_empty()


async def test_streams_go_on_while_a_long_prompt_is_encoded(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router()
    route = await router.route()
    running = router.generate()
    handle = (await next_submit(route)).handle
    begun, may_end = threading.Event(), threading.Event()
    encode = BuiltinTokenizer.encode_prompt

    def slowly(self: BuiltinTokenizer, text: str, **further: bool) -> list[int]:
        begun.set()
        assert may_end.wait(TIMEOUT_SECONDS)
        return encode(self, text, **further)

    monkeypatch.setattr(BuiltinTokenizer, "encode_prompt", slowly)
    long = router.generate(" about" * 2000)
    await router.until(begun.is_set)
    route.send([(handle, 3)], [(handle, LENGTH)])
    assert (await everything(running))[0] == [3]
    may_end.set()
    submit = await next_submit(route)
    assert len(from_u32(submit.prompt_token_ids_u32)) == 2001
    route.send(finished=[(submit.handle, LENGTH)])
    await everything(long)
