"""What the base install can do, and what it says where an extra is missing.

The environment holds the packages of requirements/base.txt alone, as links to those of this one.
"""

import json
import re
import subprocess
import tomllib
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

import grpc
import pytest

from lorrery.service.installed import EXTRAS, missing_extra
from lorrery.v1 import router_pb2, router_pb2_grpc

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==", re.MULTILINE)
MAX_DIRECT = 14
READY_SECONDS = 60


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in {*PIN.findall((ROOT / "requirements" / "base.txt").read_text(encoding="utf-8"))}:
        try:
            found = distribution(name)
        except ModuleNotFoundError:  # of another platform
            continue
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                link = packages / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(found.locate_file(file))
    (packages / "lorrery.pth").write_text(f"{ROOT / 'src'}\n")
    return folder / "bin" / "python"


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=READY_SECONDS, cwd=python.parent
    )


class Up:
    """A cluster of the base install."""

    def __init__(self, process: "subprocess.Popen[str]", grpc_address: str, http_url: str) -> None:
        self.process, self.grpc_address, self.http_url = process, grpc_address, http_url


@pytest.fixture(scope="module")
def up(python: Path) -> Iterator[Up]:
    process = subprocess.Popen(
        [python, "-m", "lorrery.cli", "up", "--workers", "1", "--free-ports"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=python.parent,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "try: lorrery load" in line:
                break
        text = "".join(lines)
        target = re.search(r"--target (\S+)$", text, re.MULTILINE)
        http = re.search(r"HTTP clients.*(http://\S+)", text)
        assert target, text
        assert http, text
        yield Up(process, target[1], http[1])
    finally:
        process.terminate()
        process.communicate(timeout=READY_SECONDS)


def test_the_base_install_has_few_direct_dependencies() -> None:
    assert len(PROJECT["dependencies"]) <= MAX_DIRECT


def test_every_extra_is_known() -> None:
    assert {*PROJECT["optional-dependencies"]} == {*EXTRAS, "all"}


@pytest.mark.cluster
def test_up_serves_openai_s_http(up: Up) -> None:
    body = {"model": "lora-r8-1", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{up.http_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 4


@pytest.mark.cluster
def test_up_serves_grpc(up: Up) -> None:
    message = router_pb2.GenerateRequest(adapter_id="lora-r8-1", text="Say something.")
    message.sampling.max_new_tokens = 4
    with grpc.insecure_channel(up.grpc_address) as channel:
        answers = list(router_pb2_grpc.RouterServiceStub(channel).Generate(message))
    assert answers[-1].HasField("finish")


@pytest.mark.cluster
def test_reflection_names_its_extra(up: Up) -> None:
    with grpc.insecure_channel(up.grpc_address) as channel:
        call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([b""])))
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == missing_extra("reflection", "server reflection")


def test_simulate(python: Path) -> None:
    done = run(python, "lorrery.cli", "simulate", "-n", "1")
    assert "tokens/s out" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("extra", "what", "arguments"),
    [
        ("certs", "lorrery certs", ["cli", "certs", "certificates"]),
        ("dask", "--backend dask", ["cli", "simulate", "--sweep", "rate=1,2", "-n", "2", "--backend", "dask"]),
        ("dns", "'dns://127.0.0.1/x:1'", ["worker", "--set", "worker.scheduler=dns://127.0.0.1/x:1"]),
        (
            "engines",
            "router.sglang_grpc: the protocol sglang",
            ["router", "--set", "router.sglang_grpc=127.0.0.1:0"],
        ),
        (
            "kv-events",
            "worker.kv_events.endpoint 'tcp://127.0.0.1:1'",
            [
                "worker",
                *("--set", "scheduler.prefix_cache.kind=blocks"),
                *("--set", "worker.kv_events.endpoint=tcp://127.0.0.1:1"),
            ],
        ),
        ("plot", "--plot", ["cli", "plan", "--plot", "plan.svg"]),
        ("ray", "--backend ray", ["cli", "simulate", "--sweep", "rate=1,2", "-n", "2", "--backend", "ray"]),
        ("tracing", "tracing.endpoint '127.0.0.1:1'", ["router", "--set", "tracing.endpoint=127.0.0.1:1"]),
    ],
)
def test_a_missing_extra_is_named_with_what_needs_it(
    python: Path, extra: str, what: str, arguments: Sequence[str]
) -> None:
    room, *rest = arguments
    free = [] if room == "cli" else ["--set", f"{room}.listen=127.0.0.1:0", "--set", f"{room}.metrics=127.0.0.1:0"]
    done = run(python, f"lorrery.{room}", *free, *rest)
    assert missing_extra(extra, what) in done.stderr
    assert done.returncode == 2


def test_the_parquet_table_and_the_plots_of_a_sweep_are_left_out(python: Path, tmp_path: Path) -> None:
    done = run(python, "lorrery.cli", "simulate", "--sweep", "rate=1,2", "-n", "2", "--out", str(tmp_path / "out"))
    text = " ".join((done.stdout + done.stderr).split())
    assert missing_extra("parquet", "sweep.parquet") in text
    assert missing_extra("plot", "a plot") in text
