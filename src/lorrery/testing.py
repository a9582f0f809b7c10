"""Engines for tests of what talks to engines: gateways, routers, clients.

    with lorrery.engines(3, lora_modules={"sql": 16}) as fleet:
        start_gateway(fleet.urls)
        ...
        assert fleet[0].requests == {"sql": 5}

Engines are those of `lorrery serve`: each is a router, a scheduler and a worker in processes of their own. A process
that uses this has one *host* (`cli/serve/host.py`), which starts them; here is the client of it, with the standard
library alone, so that nothing of a server runs in the process of the tests. Host and engines are one process group and
end with the process that started them, however it ends.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, overload

from lorrery.service.errors import LorreryError, SettingsError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
REPLICAS = 3
_TIMEOUT_SECONDS = 60.0
_END_SECONDS = 10.0
_NOT_OF_AN_ENGINE = {"port", "grpc_port", "announce", "print_config", "dry_run", "version", "help", "set"}


@contextlib.contextmanager
def engines(
    replicas: int = REPLICAS,
    model: str = MODEL,
    *,
    ports: Sequence[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    **flags: object,
) -> "Iterator[Fleet]":
    """Run equal, independent engines; yield them once all serve, and kill them at the end.

    What they have logged is then written to standard error, which pytest shows for a test that failed.

    Args:
        replicas: number of engines.
        model: of the catalogue.
        ports: HTTP port of each engine; None: free ones.
        settings: Lorrery's own, by dotted name, above the flags: `{"scheduler.policy": "vtc_fair"}`.
        flags: of `lorrery serve`, with underscores: `max_loras=4`, `enforce_eager=True`, `speedup_ratio=10`. A mapping
            of `lora_modules` is name -> rank or path, any other becomes JSON.

    Raises:
        SettingsError: a wrong flag or setting.
        LorreryError: an engine did not start.
    """
    chosen = [0] * replicas if ports is None else list(ports)
    if not chosen or len(chosen) != replicas:
        raise SettingsError(f"{replicas} engines on {len(chosen)} ports; give as many ports, and at least one")
    if others := _NOT_OF_AN_ENGINE & flags.keys():
        raise SettingsError(f"{', '.join(sorted(others))}: not for an engine of a fleet; ports=[...] are those of HTTP")
    host, number = _Host.of_this_process(), next(_numbers)
    command = {
        "fleet": number,
        "arguments": [model, *_arguments(flags)],
        "settings": {"router.mock_adapters": True, **(settings or {})},
        "ports": chosen,
    }
    try:
        found = host.call("start", **command)
        members = [Engine(host, number, index, one, found["api_key"]) for index, one in enumerate(found["engines"])]
        yield Fleet(members, host.pid)
    finally:
        with contextlib.suppress(LorreryError):  # the host has ended, and its engines with it
            host.call("stop", fleet=number)
        host.show_log()


_numbers = count()


def prepare() -> None:
    """Start what `engines` needs in the background, so that the first engines need not wait for its imports."""
    _Host.of_this_process()


def _arguments(flags: Mapping[str, object]) -> Iterator[str]:
    """Yield flags as arguments of `lorrery serve`."""
    for key, value in flags.items():
        name = f"--{key.replace('_', '-')}"
        if isinstance(value, Mapping) and key == "lora_modules":
            value = [f"{adapter}={rank_or_path}" for adapter, rank_or_path in value.items()]  # noqa: PLW2901
        if isinstance(value, bool):
            yield name if value else f"--no-{name.removeprefix('--')}"
        elif isinstance(value, Mapping):
            yield f"{name}={json.dumps(value)}"
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from (name, *map(str, value))
        elif value is not None:
            yield f"{name}={value}"


@dataclass(frozen=True)
class Fault:
    """A fault in force.

    Attributes:
        rule: in the syntax of docs/failures.md.
        met: requests, loads or workers that it has affected.
    """

    rule: str
    met: int


@dataclass(frozen=True)
class Completion:
    """The answer of an engine to one prompt.

    Attributes:
        text: of the output.
        token_ids: of the output.
        finish_reason: `stop` or `length`.
        body: the whole answer.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    body: dict[str, Any] = field(repr=False)


class Metrics:
    """What `/metrics` shows at one moment.

    Attributes:
        families: as parsed by prometheus_client, by name.
    """

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self.families: dict[str, Metric] = {one.name: one for one in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of this name, with its `_total`, `_count` or `_sum`, that have these labels.

        Raises:
            LookupError: there is no such series.
        """
        return sum(self.by("", name, **labels).values())

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return label value -> sum of the samples of this name that have these labels.

        Raises:
            LookupError: there is no such series.
        """
        known, found = False, dict[str, float]()
        for family in self.families.values():
            known = known or name.startswith(family.name)
            for sample in family.samples if name.startswith(family.name) else ():
                if sample.name == name and labels.items() <= sample.labels.items():
                    value = sample.labels.get(label, "")
                    found[value] = found.get(value, 0.0) + sample.value
        if not known:
            raise LookupError(f"no series {name}; docs/metrics.md and docs/gateways.md list those that there are")
        return found


class Engine:
    """One engine of a fleet.

    Attributes:
        http: base URL, `http://127.0.0.1:PORT`.
        grpc: HOST:PORT of Lorrery's own gRPC.
        models: names of the base model.
        pids: name of each of its processes -> process id.
        others: name of a process -> its further addresses, such as `kv_events`, by name.
    """

    def __init__(self, host: "_Host", fleet: int, number: int, described: Mapping[str, Any], api_key: str) -> None:
        self._host, self._fleet, self._number, self._api_key = host, fleet, number, api_key
        self._describe(described)

    def __repr__(self) -> str:
        return f"Engine({self.http!r})"

    def _describe(self, described: Mapping[str, Any]) -> None:
        self.http: str = described["url"]
        self.grpc: str = described["grpc"]
        self.models: list[str] = described["models"]
        self.pids: dict[str, int] = described["pids"]
        self.others: dict[str, dict[str, str]] = described["others"]

    @property
    def url(self) -> str:
        """Base URL for OpenAI's clients, `http://127.0.0.1:PORT/v1`."""
        return f"{self.http}/v1"

    @property
    def port(self) -> int:
        """HTTP port."""
        return int(self.http.rpartition(":")[2])

    def kill(self) -> None:
        """Kill its processes: open connections break, and new ones are refused."""
        self._change("kill")

    def drain(self) -> None:
        """Stop it as SIGTERM stops `lorrery serve`: new requests get 503; return once the open ones have ended."""
        self._change("drain")

    def restart(self) -> None:
        """Start it again on the same ports, with empty caches; return once it serves. One that runs is killed first."""
        self._change("restart")

    def _change(self, do: str) -> None:
        self._describe(self._host.call(do, fleet=self._fleet, engine=self._number))

    @property
    def faults(self) -> list[Fault]:
        """The faults in force."""
        return self._faults(None)

    def inject(self, *rules: str) -> None:
        """Inject faults from now on, in the syntax of docs/failures.md, in addition to those in force."""
        self._faults({"rules": rules, "add": True})

    def clear_faults(self) -> None:
        """Remove the faults that were injected."""
        self._faults({})

    def _faults(self, change: Mapping[str, Any] | None) -> list[Fault]:
        found = self._host.call("faults", fleet=self._fleet, engine=self._number, change=change)
        return [Fault(**one) for one in found]

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that requests may name."""
        return [one["id"] for one in json.loads(self._ask("/v1/models"))["data"] if one["id"] not in self.models]

    def load_adapter(self, name: str, rank: int | None = None, path: str | None = None) -> None:
        """Load an adapter as vLLM's clients do; by its rank alone, or from its folder."""
        self._ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path or "", "rank": rank})

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        self._ask("/v1/unload_lora_adapter", {"lora_name": name})

    def complete(self, prompt: str | Sequence[int], model: str | None = None, **fields: object) -> Completion:
        """Send a prompt to `/v1/completions`.

        Output depends on model, adapter, seed and position alone, so with `seed` any engine of a fleet answers with
        the same tokens: what a gateway returns can be compared with this.

        Args:
            prompt: text, or token ids.
            model: base model or adapter; None: the base model.
            fields: further fields of the body, such as `max_tokens`, `seed`, `ignore_eos`.
        """
        asked = {"model": model or self.models[0], "prompt": prompt, "return_token_ids": True, **fields}
        body = json.loads(self._ask("/v1/completions", asked))
        (choice, *_) = body["choices"]
        return Completion(choice["text"], choice["token_ids"], choice["finish_reason"], body)

    def metrics(self) -> Metrics:
        """Return what its `/metrics` shows: vLLM's series, and those of Lorrery's router."""
        return Metrics(self._ask("/metrics"))

    @property
    def requests(self) -> dict[str, int]:
        """Number of requests that have ended, however, by adapter; `base`: the base model."""
        found = self.metrics().by("adapter", "lorrery_router_adapter_requests_total")
        return {adapter: round(value) for adapter, value in found.items() if value}

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        sent = None if body is None else json.dumps({key: one for key, one in body.items() if one is not None}).encode()
        request = urllib.request.Request(f"{self.http}{path}", sent, headers)  # noqa: S310  an engine's own address
        try:
            with _direct.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                text: str = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise LorreryError(f"{self.http}{path}: {error.code}: {error.read().decode(errors='replace')}") from None
        except urllib.error.URLError as error:
            raise LorreryError(f"{self.http}{path}: {error.reason}") from None
        return text


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names


class Fleet(Sequence[Engine]):
    """The engines of one `engines`, in the order of their ports.

    Attributes:
        process_group: id of the group of all processes of this process's fleets.
    """

    def __init__(self, members: Sequence[Engine], process_group: int) -> None:
        self._members, self.process_group = members, process_group

    @overload
    def __getitem__(self, index: int) -> Engine: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Engine]: ...
    def __getitem__(self, index: int | slice) -> Engine | Sequence[Engine]:
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    @property
    def urls(self) -> list[str]:
        """Base URL of each engine for OpenAI's clients."""
        return [one.url for one in self._members]


class _Host:
    """This process's host, which runs until this process ends."""

    _current: "_Host | None" = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._log, self._num_shown = tempfile.TemporaryFile(), 0  # noqa: SIM115  as long as the process
        self._process = subprocess.Popen(  # noqa: S603  our own command line
            [sys.executable, "-P", "-m", "lorrery.cli.serve.host", str(self.owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._ids = count()
        atexit.register(self._end)

    @classmethod
    def of_this_process(cls) -> "_Host":
        """Return it; a process that was forked from one with a host gets its own, as does one whose host has ended."""
        with cls._lock:
            last = cls._current
            if last is None or last.owner != os.getpid() or last.has_ended:
                last = cls._current = cls()
            return last

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self._process.poll() is not None

    def call(self, do: str, **more: object) -> Any:  # noqa: ANN401  what JSON may hold
        """Carry out a command, and return its result.

        Raises:
            SettingsError: a flag or setting is wrong.
            LorreryError: it failed, or the host has ended.
        """
        with self._lock:
            try:
                answer = self._exchange({"id": next(self._ids), "do": do, **more})
            except BrokenPipeError:
                answer = None
        if answer is None:
            raise LorreryError(f"the process that runs the engines, pid {self.pid}, has ended; start them again")
        if "error" in answer:
            raise (SettingsError if answer["of_settings"] else LorreryError)(answer["error"])
        return answer["result"]

    def _exchange(self, command: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a command, and return its answer; None: there is none."""
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None
        assert received is not None
        sent.write(json.dumps(command) + "\n")
        sent.flush()
        while line := received.readline():
            answer: dict[str, Any] = json.loads(line)
            if answer["id"] == command["id"]:  # an earlier one is of a call that was interrupted, as by Ctrl-C
                return answer
        return None

    def show_log(self) -> None:
        """Write to standard error what host and engines have logged since the last call."""
        logged = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, self._num_shown)
        self._num_shown += len(logged)
        sys.stderr.write(logged.decode(errors="replace"))

    def _end(self) -> None:
        if self.owner != os.getpid() or self.has_ended:
            return
        try:
            self._process.communicate(timeout=_END_SECONDS)  # closes its standard input
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
