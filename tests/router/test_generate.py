"""One request through a router: what the scheduler is asked, what the client gets."""

import grpc
from lorrery.v1 import router_pb2, types_pb2

from tests.router.conftest import StartRouter, everything, failure, next_submit
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
        sampling=types_pb2.SamplingParams(max_new_tokens=3, ignore_eos=True),
    )
    submit = await next_submit(route)
    assert (submit.request_id, submit.adapter_id, submit.tenant_id) == ("r1", "lora-0", "t1")
    assert from_u32(submit.prompt_token_ids_u32) == [1, 5, 6]
    assert submit.produced_token_ids_u32 == b""
    assert (submit.sampling.seed, submit.sampling.max_new_tokens, submit.sampling.ignore_eos) == (7, 3, True)
    assert submit.sampling.true_output_tokens == 5
    usage = types_pb2.Usage(
        prompt_tokens=3, completion_tokens=3, cached_tokens=1, queue_seconds=0.5, worker_id="w0", num_requeues=2
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
    call = router.generate(token_ids=router_pb2.TokenIds(ids=[9, 8, 2**32 - 1]))
    submit = await next_submit(route)
    assert from_u32(submit.prompt_token_ids_u32) == [9, 8, 2**32 - 1]
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
        (router.generate(true_output_tokens=0), invalid, "true_output_tokens must be at least 1, got 0"),
        (
            router.generate(model="GPT-9"),
            not_found,
            "model 'GPT-9' is not served here; the cluster serves 'Llama-2-7B'",
        ),
    ]
    for call, code, message in cases:
        error = await failure(call)
        assert (error.code(), error.details()) == (code, message)
    await router.until_empty()
    assert route.num_submits == 0
    assert router.sample("lorrery_router_requests_total", outcome="invalid") == 6
    assert router.sample("lorrery_router_requests_total", outcome="not_found") == 1
