"""Who may do what at a router: keys, adapters, operators' calls; over real gRPC."""

import hashlib
from pathlib import Path

import grpc
import grpc.aio
import pytest

from lorrery.router.access import ApiKey, check_use, read_keys
from lorrery.service.errors import PermissionDenied, SettingsError
from lorrery.v1 import router_pb2, scheduler_pb2, types_pb2
from tests.cluster.client import error_info
from tests.cluster.harness import wait_until
from tests.router.conftest import TIMEOUT_SECONDS, StartRouter, everything, failure, next_submit

LENGTH = 3
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def entry(secret: str, **fields: object) -> str:
    """One key as it stands in the file."""
    lines = [f'sha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"']
    for name, value in fields.items():
        lines.append(f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}")
    return "[[keys]]\n" + "\n".join(lines) + "\n"


ACME = entry("acme-secret", name="acme-1", tenant="acme", adapters=["acme-*"], load_adapters=["acme-*"])
BETA = entry("beta-secret", name="beta-1", tenant="beta", adapters=["beta-*"], base_model=False, max_new_tokens=8)
ROOT = entry("root-secret", name="root", tenant="ops", operator=True)


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(ACME + BETA + ROOT)
    return path


def replace(path: Path, text: str) -> None:
    """Write a file as its owner should: whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def ask(**fields) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(text=" about", **fields)


async def refusal(call) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    error = await failure(call)
    reason, facts, _ = error_info(error)
    return error.code(), reason, facts


async def unary_refusal(call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


@pytest.mark.parametrize(
    "metadata",
    [(), bearer("wrong"), (("authorization", "acme-secret"),), (("authorization", "Basic acme-secret"),), bearer("")],
    ids=["none", "wrong", "no scheme", "other scheme", "empty"],
)
async def test_no_call_is_answered_without_a_valid_key(start_router: StartRouter, keys: Path, metadata):
    harness = await start_router(keys=keys)
    code, reason, facts = await refusal(harness.stub.Generate(ask(), metadata=metadata, timeout=TIMEOUT_SECONDS))
    assert (code, reason) == (UNAUTHENTICATED, "UNAUTHENTICATED")
    assert "acme" not in str(facts)
    for method in router_pb2.DESCRIPTOR.services_by_name["RouterService"].methods:
        if method.name != "Generate":
            request = getattr(router_pb2, method.input_type.name)()
            call = getattr(harness.stub, method.name)(request, metadata=metadata, timeout=TIMEOUT_SECONDS)
            code = (await failure(call)).code() if method.server_streaming else await unary_refusal(call)
            assert code is UNAUTHENTICATED, method.name
    assert harness.sample("lorrery_router_requests_total", outcome="unauthenticated") == 1


async def test_a_key_names_the_tenant_of_its_requests(start_router: StartRouter, keys: Path):
    harness = await start_router(keys=keys)
    route = await harness.route()
    call = harness.stub.Generate(ask(adapter_id="acme-7"), metadata=bearer("acme-secret"), timeout=TIMEOUT_SECONDS)
    submit = await next_submit(route)
    assert (submit.tenant_id, submit.adapter_id) == ("acme", "acme-7")
    route.send([(submit.handle, 1)], [(submit.handle, LENGTH)])
    await everything(call)


async def test_a_key_may_not_speak_for_another_tenant_nor_use_its_adapters(start_router: StartRouter, keys: Path):
    harness = await start_router(keys=keys)
    acme, beta = bearer("acme-secret"), bearer("beta-secret")
    for request, metadata, field in (
        (ask(tenant_id="beta"), acme, "tenant_id"),
        (ask(adapter_id="beta-0"), acme, "adapter_id"),
        (ask(adapter_id="lora-0"), acme, "adapter_id"),
        (ask(), beta, "adapter_id"),  # this key may not ask the base model
        (ask(adapter_id="beta-0", sampling=types_pb2.SamplingParams(max_new_tokens=9)), beta, "max_new_tokens"),
    ):
        code, reason, facts = await refusal(harness.stub.Generate(request, metadata=metadata, timeout=TIMEOUT_SECONDS))
        assert (code, reason, facts["field"]) == (DENIED, "PERMISSION_DENIED", field), request
    assert harness.sample("lorrery_router_requests_total", outcome="denied") == 5


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "over"),
    [
        (4, 8, None),
        (1, 9, ("max_new_tokens", 9, 8)),
        (5, 8, ("tokens_per_minute", 13, 12)),  # a prompt counts too
        (12, 1, ("tokens_per_minute", 13, 12)),
    ],
)
def test_a_request_over_a_limit_of_its_key_is_denied(
    prompt_tokens: int, max_new_tokens: int, over: tuple[str, int, int] | None
):
    key = ApiKey(name="k", sha256="0" * 64, tenant="t", max_new_tokens=8, tokens_per_minute=12)
    if over is None:
        check_use(key, "lora-0", max_new_tokens, prompt_tokens)
        return
    field, value, limit = over
    with pytest.raises(PermissionDenied) as error:
        check_use(key, "lora-0", max_new_tokens, prompt_tokens)
    assert error.value.facts == {"field": field, "value": str(value), "limit": str(limit)}


async def test_what_is_forbidden_is_so_whether_it_exists_or_not(start_router: StartRouter, keys: Path):
    harness = await start_router(keys=keys)
    harness.schedulers[0].listed["beta-0"] = 8
    metadata = bearer("acme-secret")
    errors = [
        await failure(harness.stub.Generate(ask(adapter_id=name), metadata=metadata, timeout=TIMEOUT_SECONDS))
        for name in ("beta-0", "beta-1")
    ]
    assert errors[0].details().replace("beta-0", "beta-1") == errors[1].details()


async def test_a_tenant_sees_its_own_adapters_and_nobody_s_counts(start_router: StartRouter, keys: Path):
    harness = await start_router(keys=keys)
    scheduler = harness.schedulers[0]
    scheduler.listed |= {"acme-0": 8, "beta-0": 8}
    await harness.until_connected()

    async def seen(secret: str) -> list[str]:
        answer = await harness.stub.ListAdapters(
            router_pb2.ListAdaptersRequest(), metadata=bearer(secret), timeout=TIMEOUT_SECONDS
        )
        return [adapter.adapter_id for adapter in answer.adapters]

    assert await seen("acme-secret") == ["acme-0"]
    assert await seen("beta-secret") == ["beta-0"]
    assert await seen("root-secret") == ["lora-0", "acme-0", "beta-0"]

    async def status(secret: str, *, adapter_figures: bool = False) -> router_pb2.Shard:
        request = router_pb2.GetClusterStatusRequest(adapter_figures=adapter_figures)
        answer = await harness.stub.GetClusterStatus(request, metadata=bearer(secret), timeout=TIMEOUT_SECONDS)
        return answer.shards[0]

    whole, own = await status("root-secret"), await status("acme-secret")
    assert (whole.num_unplaced, whole.workers[0].num_running) == (3, 2)
    assert whole.workers[0].resident_adapters == ["beta-0", "acme-0"]
    assert (own.num_unplaced, own.workers[0].num_running) == (0, 0)
    assert own.workers[0].resident_adapters == ["acme-0"]
    assert (own.workers[0].worker_id, own.max_req_input_len) == ("w0", 100)
    whole, own = await status("root-secret", adapter_figures=True), await status("acme-secret", adapter_figures=True)
    assert whole.adapter_figures.adapter_ids == ["beta-0"]
    assert not own.HasField("adapter_figures")
    assert not (await status("root-secret")).HasField("adapter_figures")


async def test_a_key_sees_an_adapter_that_it_may_only_load(start_router: StartRouter, keys: Path):
    replace(keys, entry("loads", name="loads", tenant="acme", adapters=[], load_adapters=["acme-*"]))
    harness = await start_router(keys=keys)
    harness.schedulers[0].listed |= {"acme-0": 8, "beta-0": 8}
    await harness.until_connected()
    answer = await harness.stub.ListAdapters(
        router_pb2.ListAdaptersRequest(), metadata=bearer("loads"), timeout=TIMEOUT_SECONDS
    )
    assert [adapter.adapter_id for adapter in answer.adapters] == ["acme-0"]


async def test_adapters_are_loaded_by_who_may(start_router: StartRouter, keys: Path):
    harness = await start_router(keys=keys)
    await harness.until_connected()

    def load(name: str, secret: str):
        request = router_pb2.LoadAdapterRequest(adapter=types_pb2.Adapter(adapter_id=name, rank=8))
        return harness.stub.LoadAdapter(request, metadata=bearer(secret), timeout=TIMEOUT_SECONDS)

    def unload(name: str, secret: str):
        request = router_pb2.UnloadAdapterRequest(adapter_id=name)
        return harness.stub.UnloadAdapter(request, metadata=bearer(secret), timeout=TIMEOUT_SECONDS)

    assert await unary_refusal(load("beta-9", "acme-secret")) is DENIED
    assert await unary_refusal(load("beta-9", "beta-secret")) is DENIED  # it may use it, not load it
    assert await unary_refusal(unload("lora-0", "acme-secret")) is DENIED
    await load("acme-9", "acme-secret")
    await load("beta-9", "root-secret")
    await unload("acme-9", "acme-secret")
    assert set(harness.schedulers[0].adapters) == {"lora-0", "beta-9"}


async def test_the_file_is_read_again_when_it_changes(start_router: StartRouter, keys: Path, capfd):
    harness = await start_router(keys=keys)
    await harness.until_connected()

    async def answer(secret: str) -> str:
        call = harness.stub.ListAdapters(
            router_pb2.ListAdaptersRequest(), metadata=bearer(secret), timeout=TIMEOUT_SECONDS
        )
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def becomes(secret: str, word: str) -> None:
        async def there() -> bool:
            return await answer(secret) == word

        await wait_until(there, what=f"{secret}: {word}")

    replace(keys, ACME + entry("new-secret", name="new", tenant="new"))
    await becomes("new-secret", "OK")
    assert await answer("beta-secret") == "UNAUTHENTICATED"
    replace(keys, "[[keys]]\nsha256 = 'short'\n")
    await becomes("new-secret", "OK")
    replace(keys, ACME)
    await becomes("new-secret", "UNAUTHENTICATED")
    assert await answer("acme-secret") == "OK"


@pytest.mark.parametrize("content", ["[[keys]\n", "", "# keys\n"])
async def test_a_broken_file_keeps_the_old_keys_and_says_so(
    start_router: StartRouter, keys: Path, capsys, content: str
):
    harness = await start_router(keys=keys)
    await harness.until_connected()
    replace(keys, content)
    said: list[str] = []

    async def says_so() -> bool:
        metadata = bearer("acme-secret")
        await harness.stub.ListAdapters(router_pb2.ListAdaptersRequest(), metadata=metadata, timeout=TIMEOUT_SECONDS)
        captured = capsys.readouterr()
        said.append(captured.out + captured.err)
        return "file_not_reread" in said[-1]

    await wait_until(says_so, what="the log says that the file is broken")
    assert str(keys) in said[-1]


WRONG = {
    "no hash": ("[[keys]]\nname = 'a'\n", ["sha256"]),
    "hash that is none": ("[[keys]]\nname = 'a'\nsha256 = 'acme'\n", ["sha256", "64"]),
    "a key in place of its hash": ("[[keys]]\nname = 'a'\nsha256 = 'lry_abc'\n", ["sha256", "64"]),
    "the same key twice": (ACME + ACME.replace("acme-1", "acme-2"), ["acme-1", "acme-2"]),
    "the same name twice": (ACME + entry("other", name="acme-1", tenant="acme"), ["acme-1", "twice"]),
    "unknown field": (ACME + "colour = 'red'\n", ["colour"]),
    "quota of zero": (ACME + "requests_per_minute = 0\n", ["requests_per_minute"]),
    "no toml": ("[[keys]\n", ["keys.toml"]),
    "nothing": ("", ["keys.toml", "[[keys]]", "keys = []"]),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_file_that_cannot_be_is_an_error_that_says_what_is_wrong(tmp_path: Path, why: str):
    text, words = WRONG[why]
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_keys(path)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


async def test_without_keys_everybody_may_do_everything(start_router: StartRouter):
    harness = await start_router()
    route = await harness.route()
    call = harness.stub.Generate(ask(tenant_id="any"), timeout=TIMEOUT_SECONDS)
    submit = await next_submit(route)
    assert submit.tenant_id == "any"
    assert submit.quota == scheduler_pb2.Quota()
    route.send([(submit.handle, 1)], [(submit.handle, LENGTH)])
    await everything(call)


async def test_a_key_that_is_taken_back_ends_its_open_streams_and_no_others(start_router: StartRouter, keys: Path):
    harness = await start_router(keys=keys)
    route = await harness.route()
    calls, handles = [], []
    for name in ("acme", "root"):
        calls.append(harness.stub.Generate(ask(), metadata=bearer(f"{name}-secret"), timeout=TIMEOUT_SECONDS))
        handles.append((await next_submit(route)).handle)
    route.send([(handle, 3) for handle in handles])
    replace(keys, ROOT)
    error = await failure(calls[0])
    assert (error.code(), error_info(error)[0]) == (UNAUTHENTICATED, "UNAUTHENTICATED")
    assert error.details() == "the API key 'acme-1' has been taken back; ask the operator for another"
    await harness.until(lambda: route.cancelled == handles[:1])
    assert harness.sample("lorrery_router_requests_total", outcome="unauthenticated") == 1
    route.send([(handles[1], 4)], [(handles[1], LENGTH)])
    assert (await everything(calls[1]))[0] == [3, 4]
