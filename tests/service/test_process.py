import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

from lorrery.service.entry_point import ECHO_SECONDS
from lorrery.service.errors import LorreryError
from lorrery.service.local.processes import start_python
from lorrery.service.network.channel import open_channel
from lorrery.service.network.server import LIVENESS
from lorrery.service.process import run_service
from lorrery.service.settings.cluster import Settings
from lorrery.service.settings.sections import TlsSettings
from lorrery.service.telemetry.metrics import new_registry
from tests.cluster.harness import ignored, metric, wait_until
from tests.service.services import ECHO, EchoService

PLAIN = TlsSettings()
Ask = Callable[..., Awaitable[reflection_pb2.ServerReflectionResponse]]


class Running:
    """A service that runs in this process."""

    def __init__(self, service: EchoService, task: asyncio.Task[None], announce: Path) -> None:
        self.service = service
        self.task = task
        announced = json.loads(announce.read_text())
        self.address: str = announced["grpc"]
        self.metrics: str = announced["metrics"]


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, *, drain_seconds: float = 60.0, settings: Settings | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Running]:
    service, announce = EchoService(), tmp_path / "announce.json"
    task = asyncio.create_task(
        run_service(
            service,
            listen=f"{host}:0",
            metrics=f"{host}:0",
            settings=settings or Settings.model_validate({}),
            drain_seconds=drain_seconds,
            registry=new_registry("echo"),
            announce=announce,
        )
    )
    await asyncio.wait((task, asyncio.create_task(service.running.wait())), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield Running(service, task, announce)
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def health(channel: grpc.aio.Channel, name: str = "") -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
    return answer.status


async def test_health_answers_for_the_server_and_each_service(tmp_path: Path):
    async with running(tmp_path) as up, open_channel(up.address, PLAIN) as channel:
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert await health(channel, "test.Echo") == health_pb2.HealthCheckResponse.SERVING
        await up.service.set_ready(False)
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(channel, LIVENESS) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(channel, "test.Nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@contextlib.asynccontextmanager
async def reflection(tmp_path: Path, version: str) -> AsyncIterator[Ask]:
    """Yield what asks a service's reflection of one version."""
    async with running(tmp_path) as up, open_channel(up.address, PLAIN) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(timeout=60)

        async def ask(**request: str) -> reflection_pb2.ServerReflectionResponse:
            await call.write(reflection_pb2.ServerReflectionRequest(**request))
            return await call.read()

        try:
            yield ask
        finally:
            call.cancel()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services(tmp_path: Path, version: str):
    async with reflection(tmp_path, version) as ask:
        answer = await ask(list_services="")
    assert {service.name for service in answer.list_services_response.service} == {
        "test.Echo",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_itself_under_the_name_of_its_version(tmp_path: Path, version: str):
    async with reflection(tmp_path, version) as ask:
        answer = await ask(file_containing_symbol=f"grpc.reflection.{version}.ServerReflection")
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(file)
        for file in answer.file_descriptor_response.file_descriptor_proto
    ]
    assert [file.package for file in files] == [f"grpc.reflection.{version}"]
    method = files[0].service[0].method[0]
    assert method.input_type == f".grpc.reflection.{version}.ServerReflectionRequest"
    types = {field.type_name.rpartition(".")[0] for kind in files[0].message_type for field in kind.field}
    assert types == {"", f".grpc.reflection.{version}"}


async def test_reflection_finds_methods_and_values_of_enums(tmp_path: Path):
    async with reflection(tmp_path, "v1") as ask:
        for symbol, file in (
            ("grpc.health.v1.Health.Check", "grpc_health/v1/health.proto"),
            ("grpc.health.v1.HealthCheckResponse.SERVING", "grpc_health/v1/health.proto"),
            ("grpc.health.v1.HealthCheckResponse.ServingStatus.SERVING", "grpc_health/v1/health.proto"),
            ("grpc.health.v1.HealthCheckResponse.status", "grpc_health/v1/health.proto"),
            ("grpc.reflection.v1.ServerReflection.ServerReflectionInfo", "grpc_reflection/v1/reflection.proto"),
        ):
            answer = await ask(file_containing_symbol=symbol)
            found = descriptor_pb2.FileDescriptorProto.FromString(
                answer.file_descriptor_response.file_descriptor_proto[0]
            )
            assert found.name == file, symbol
        answer = await ask(file_containing_symbol="grpc.health.v1.Health.Other")
        assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_messages_of_the_size_that_a_service_takes_pass_and_no_larger_ones(tmp_path: Path):
    async with running(tmp_path) as up, open_channel(up.address, PLAIN) as channel:
        echo = channel.unary_unary(ECHO)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echo(bytes(7 * 1024 * 1024), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        request = bytes(5 * 1024 * 1024)
        assert await echo(request, timeout=60) == request


async def test_metrics_endpoint_shows_process_build_and_state(tmp_path: Path):
    async with running(tmp_path) as up:
        assert metric(up.metrics, "process_cpu_seconds_total") > 0
        assert metric(up.metrics, "lorrery_build_info", service="echo") == 1
        assert metric(up.metrics, "lorrery_service_state", state="ready") == 1
        assert metric(up.metrics, "lorrery_service_state") == 1


async def test_second_service_on_a_port_is_an_error_that_names_setting_and_cure(tmp_path: Path):
    async with running(tmp_path) as up:
        for taken, addresses in (
            ("echo.listen", {"listen": up.address, "metrics": "127.0.0.1:0"}),
            ("echo.metrics", {"listen": "127.0.0.1:0", "metrics": up.metrics}),
        ):
            address = addresses[taken.partition(".")[2]]
            with pytest.raises(LorreryError) as caught:
                await run_service(
                    EchoService(),
                    **addresses,
                    settings=Settings.model_validate({}),
                    drain_seconds=1,
                    registry=new_registry("echo"),
                )
            message = str(caught.value)
            assert message.startswith(
                f"{taken}: address {address} cannot be taken: Address already in use; give another"
            )
            assert "--free-ports" in message


async def test_signal_makes_health_not_serving_before_the_drain_and_stops_after_it(tmp_path: Path):
    async with running(tmp_path) as up, open_channel(up.address, PLAIN) as channel:
        up.service.idle.clear()
        signal.raise_signal(signal.SIGTERM)
        await up.service.drains.wait()
        # Draining: health says so, and calls are still answered.
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(channel, "test.Echo") == health_pb2.HealthCheckResponse.NOT_SERVING
        await up.service.set_ready(True)
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(channel, LIVENESS) == health_pb2.HealthCheckResponse.SERVING
        assert metric(up.metrics, "lorrery_service_state", state="draining") == 1
        assert await channel.unary_unary(ECHO)(b"x", timeout=60) == b"x"
        assert not up.task.done()
        up.service.idle.set()
        await up.task
        assert up.service.happened == ["run", "drain", "drained", "run cancelled"]


async def test_drain_is_bounded(tmp_path: Path):
    async with running(tmp_path, drain_seconds=0.05) as up:
        up.service.idle.clear()
        signal.raise_signal(signal.SIGINT)
        await up.task
        assert up.service.happened == ["run", "drain", "run cancelled"]


async def test_open_watch_on_health_does_not_hold_up_the_stop(tmp_path: Path):
    async with running(tmp_path) as up, open_channel(up.address, PLAIN) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            signal.raise_signal(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            async with asyncio.timeout(60):
                await up.task
        finally:
            watch.cancel()


# ---- as a process ---------------------------------------------------------------------------------------------------


async def start(*arguments: str) -> asyncio.subprocess.Process:
    script = str(Path(__file__).with_name("services.py"))
    free = ["--set", "router.listen=127.0.0.1:0", "--set", "router.metrics=127.0.0.1:0"]
    return await start_python(
        [script, *free, *arguments], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, error = await process.communicate()
    return process.returncode, out.decode(), error.decode()


async def start_and_wait(tmp_path: Path, *arguments: str) -> asyncio.subprocess.Process:
    announce = tmp_path / "announce.json"
    process = await start("--announce", str(announce), *arguments)
    await wait_until(announce.exists)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_process_exits_with_0_after_a_signal(tmp_path: Path, number: signal.Signals):
    process = await start_and_wait(tmp_path)
    process.send_signal(number)
    code, _, error = await finish(process)
    assert code == 0
    assert "Traceback" not in error
    assert error.index("draining") < error.index("stopped")


async def test_process_under_nohup_outlives_its_terminal(tmp_path: Path):
    with ignored(signal.SIGHUP):  # as nohup leaves it to its program
        process = await start_and_wait(tmp_path)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)  # behind it: a higher number is handled later
    assert (await finish(process))[0] == 0, "the first of two signals drains, a second one kills"


async def test_calls_that_take_time_to_end_are_waited_for_and_leave_no_traceback(tmp_path: Path):
    process = await start_and_wait(tmp_path, "--set", "model=lingers")
    address = json.loads((tmp_path / "announce.json").read_text())["grpc"]
    async with open_channel(address, PLAIN) as channel:
        call = channel.unary_unary(ECHO)(b"", wait_for_ready=True)
        with pytest.raises(TimeoutError):  # it is open
            await asyncio.wait_for(asyncio.shield(call), 0.5)
        process.send_signal(signal.SIGTERM)
        code, _, error = await finish(process)
        call.cancel()
    assert code == 0
    assert "Traceback" not in error
    assert "not handled" not in error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_second_signal_ends_the_process_at_once(tmp_path: Path, number: signal.Signals, code: int):
    process = await start_and_wait(tmp_path, "--set", "model=holds", "--set", "log.format=json")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    events: list[str] = []
    while "draining" not in events:
        events.append(json.loads(await process.stderr.readline())["event"])
    await asyncio.sleep(2 * ECHO_SECONDS)  # sooner, it would be taken for the first one's echo
    process.send_signal(number)
    assert (await finish(process))[0] == code


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (
            ["--set", "router.listenn=x:1"],
            2,
            "echo: error: router.listenn: no such setting; did you mean router.listen? (--set)\n",
        ),
        (["--config", "/nowhere.toml"], 2, "echo: error: /nowhere.toml: No such file or directory\n"),
        (
            ["--set", "client_tls.ca=x", "--set", "server_tls.ca=x"],
            2,
            "echo: error: server_tls.ca: needs server_tls.cert",
        ),
        (
            ["--set", "server_tls.cert=/nowhere.pem", "--set", "server_tls.key=/nowhere.key"],
            2,
            "echo: error: server_tls.cert: /nowhere.pem: No such file or directory\n",
        ),
        (
            ["--announce", "/nowhere/announce"],
            1,
            "echo: error: --announce /nowhere/announce: No such file or directory",
        ),
        (["--set", "model=fails"], 1, "echo: error: the disk is full of eels\n"),
    ],
)
async def test_our_own_errors_are_one_line(arguments: Sequence[str], code: int, line: str):
    result, out, error = await finish(await start("--set", "log.level=error", *arguments))
    assert result == code
    assert error.startswith(line)
    assert error.count("\n") == 1
    assert out == ""


async def test_other_errors_keep_their_traceback():
    code, _, error = await finish(await start("--set", "model=breaks"))
    assert code == 1
    assert "ZeroDivisionError: 1 / 0" in error


async def test_an_exit_of_code_that_the_service_calls_is_an_error():
    code, _, error = await finish(await start("--set", "log.level=error", "--set", "model=exits"))
    assert code == 1
    assert error.startswith("echo: error: ")
    assert "raised SystemExit(0) (" in error
    assert error.count("\n") == 1


async def test_version_and_help():
    assert (await finish(await start("--version")))[1].startswith("lorrery echo ")
    code, out, _ = await finish(await start("--help"))
    assert code == 0
    assert all(flag in out for flag in ("--config", "--set", "--announce", "--version"))


async def test_help_of_a_service_keeps_what_is_in_brackets():
    pipe = asyncio.subprocess.PIPE
    process = await start_python(["-m", "lorrery.scheduler", "--help"], stdout=pipe, stderr=pipe)
    code, out, _ = await finish(process)
    assert code == 0
    assert "[scheduler]" in out
    assert "[adapters]" in out


@pytest.mark.parametrize(
    ("name", "value"), [("LORRERY_ROUTER__SCHEDULERS", "127.0.0.1:5"), ("LORRERY_SCHEDULER", "foo")]
)
async def test_malformed_variable_is_one_line(name: str, value: str):
    pipe = asyncio.subprocess.PIPE
    process = await start_python(["-m", "lorrery.scheduler"], stdout=pipe, stderr=pipe, variables={name: value})
    code, out, error = await finish(process)
    assert (code, out) == (2, "")
    assert error.startswith(f"scheduler: error: environment variable {name}: a JSON ")
    assert error.endswith(f" expected, got {value!r}\n")


async def test_logs_are_json_events_with_the_service_name(tmp_path: Path):
    process = await start_and_wait(tmp_path, "--set", "log.format=json")
    process.send_signal(signal.SIGTERM)
    _, _, error = await finish(process)
    events = [json.loads(line) for line in error.splitlines()]
    assert [event["event"] for event in events] == ["listening", "draining", "stopped"]
    assert {event["service"] for event in events} == {"echo"}


@pytest.mark.parametrize(("host", "dialled"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")])
async def test_the_log_says_what_is_bound_and_the_announcement_what_to_dial(tmp_path: Path, host: str, dialled: str):
    with capture_logs() as events:
        async with running(tmp_path, host=host) as up:
            assert {up.address.rpartition(":")[0], up.metrics.rpartition(":")[0]} == {dialled}
    (listening,) = [event for event in events if event["event"] == "listening"]
    for name, address in (("address", up.address), ("metrics", up.metrics)):
        assert listening[name] == f"{host}:{address.rpartition(':')[2]}"


def test_interpreter_runs_uvloop_where_it_is_there():
    uvloop = pytest.importorskip("uvloop")
    from lorrery.service.tasks import loop_factory

    assert loop_factory() is uvloop.new_event_loop
    assert sys.version_info >= (3, 11)
