"""The corpus: which RPC a case calls, with which messages. Every RPC of the descriptors is called, later ones too."""

import random
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from lorrery.v1 import router_pb2, scheduler_pb2, types_pb2
from tests.fuzz_rpc.mutator import Hints, Mutator

ROUTER, SCHEDULER, WORKER = "router", "scheduler", "worker-0"
FAULTY_ROUTER = "router-1"
"""The one whose requests may meet the faults that are set: those hold for whoever calls this router."""

_ROUTER_SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"]
_SCHEDULER_SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]

_SERVED: dict[Any, tuple[str, ...]] = {
    _ROUTER_SERVICE: (ROUTER, FAULTY_ROUTER),
    _SCHEDULER_SERVICE: (SCHEDULER,),
    _HEALTH: (ROUTER, SCHEDULER, WORKER),
    _REFLECTION: (ROUTER, SCHEDULER, WORKER),
}
METHODS: tuple[MethodDescriptor, ...] = tuple(method for service in _SERVED for method in service.methods)
OURS = frozenset({_ROUTER_SERVICE.full_name, _SCHEDULER_SERVICE.full_name})
"""Services whose errors say more than a status."""

_WEIGHTS = {"Generate": 6, "Route": 6, "Attach": 6, "SetFaults": 2, "LoadAdapter": 2, "RegisterAdapter": 2}
_PROMPT = b"\x03\0\0\0" * 8

HINTS: Hints = {
    "model": ["", "Llama-3-8B"],
    "adapter_id": ["", "", "big", "fuzz-0", "fuzz-1", "fuzz-2"],
    "rank": [0, 8, 16, 64],
    "version": [0, 0, 1, 1_700_000_000_000_000],
    "forgotten": [0, 0, 1],
    "tenant_id": ["", "fuzz"],
    "request_id": ["", "same"],
    "router_id": ["fuzz-router"],
    "worker_id": ["fuzz-worker", "fuzz-worker-2", "worker-0"],
    "gpu": ["H100-SXM", "A10G"],
    "step_time_model": ["roofline", "llm-mock"],
    "tensor_parallel": [1],
    "max_total_token_num": [100_000, 100_000, 64],
    "heartbeat_seconds": [0.2],
    "plan_id": [0, 1, 2],
    "text": ["hello world", "hello"],
    "ids": [3, 4, 5],
    "max_new_tokens": [1, 16, 64],
    "true_output_tokens": [1, 5],
    "temperature": [1.0],
    "top_p": [1.0],
    "top_k": [1, -1],
    "presence_penalty": [0.0],
    "frequency_penalty": [0.0],
    "stop_sequences": ["stop", "the", "a"],
    "handle": [1, 2, 3, 3],
    "prompt_token_ids_u32": [_PROMPT, _PROMPT, _PROMPT[:-1]],
    "produced_token_ids_u32": [b"", b"", _PROMPT, b"\x01"],
    "cancel_handles_u32": [b"\x01\0\0\0", b"\x02\0\0\0\x03\0\0\0", b"\x01"],
    "rules": [
        *("refuse,first=3,tenant=fuzz", "cut,after=1,share=0.5", "stall,after=1,seconds=0.01", "delay,seconds=0.01"),
        *(
            "refuse,status=DATA_LOSS,share=1e-9",
            "delay,seconds=1e999999999",
            "refuse,share=NaN",
            "worker_loss,at=0,worker=w",
            "slow_worker,worker=fuzz-worker,factor=2",
            "freeze_worker,worker=fuzz-worker-1",
            "adapter_load_failure,adapter=fuzz-0,first=1",
        ),
        "refuse,tenant=" + "x" * 20_000,
    ],
    "service": ["", "lorrery.v1.RouterService", "lorrery.v1.SchedulerService"],
    "file_containing_symbol": ["lorrery.v1.RouterService", "google.protobuf.Any"],
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of the corpus.

    Attributes:
        number: within the seed.
        process: which is called.
        path: of the RPC.
        messages: to be sent; for an RPC that takes one message there may be none.
        pause: wait for the answer to the first message before the rest goes out.
        reads: so many answers are read; then, or if it `hangs_up` before the end of what it sends, it cancels.
        hangs_up: without an end.
    """

    number: int
    process: str
    path: str
    messages: tuple[bytes, ...]
    pause: bool
    reads: int
    hangs_up: bool

    @property
    def title(self) -> str:
        """What it is about."""
        shown = " ".join(message[:24].hex() + ("..." if len(message) > 24 else "") for message in self.messages[:4])
        return f"case {self.number}: {self.process} {self.path}: {len(self.messages)} messages: {shown}"


def draw_case(seed: int, number: int) -> Case:
    """Draw a case; the same two numbers give the same one."""
    rng = random.Random(f"{seed}/{number}")
    mutator = Mutator(rng, HINTS)
    (method,) = rng.choices(METHODS, [_WEIGHTS.get(method.name, 1) for method in METHODS])
    service = method.containing_service
    # What one router is told to break must not break what others ask of it.
    process = FAULTY_ROUTER if method.name == "SetFaults" else rng.choice(_SERVED[service])
    if method.client_streaming:
        messages = _stream(rng, mutator, method)
    elif rng.random() < 0.02:
        messages = ()
    else:
        messages = (_bytes(rng, mutator, method.input_type),)
    return Case(
        number,
        process,
        f"/{service.full_name}/{method.name}",
        messages,
        pause=rng.random() < 0.5,
        reads=1 if method.name.startswith("Watch") else rng.choice((1, 4, 40)),
        hangs_up=rng.random() < 0.2,
    )


def _bytes(rng: random.Random, mutator: Mutator, kind: Descriptor) -> bytes:
    data = mutator.message(kind).SerializeToString()
    return mutator.mangled(data) if rng.random() < 0.3 else data


def _stream(rng: random.Random, mutator: Mutator, method: MethodDescriptor) -> tuple[bytes, ...]:
    """Most streams begin as they should, and so come to what they should not say."""
    rest = [_bytes(rng, mutator, method.input_type) for _ in range(rng.choice((0, 1, 2, 3, 8)))]
    if rng.random() < 0.8:
        if method.name == "Route":
            hello = scheduler_pb2.RouteRequest(hello=scheduler_pb2.RouterHello(router_id="fuzz-router"))
            rest.insert(0, hello.SerializeToString())
        elif method.name == "Attach":
            rest.insert(0, _worker_hello(rng).SerializeToString())
    return tuple(rest)


def _worker_hello(rng: random.Random) -> scheduler_pb2.AttachRequest:
    return scheduler_pb2.AttachRequest(
        hello=scheduler_pb2.WorkerHello(
            worker_id=f"fuzz-worker-{rng.randrange(4)}",
            gpu="H100-SXM",
            model="Llama-3-8B",
            tensor_parallel=1,
            max_total_token_num=rng.choice((16, 100_000, 2**64 - 1)),
            step_time_model="roofline",
            instance_id=rng.choice(("", "one", "two")),
            heartbeat_seconds=0.2,
            kv_events=rng.choice((None, types_pb2.KvEventSource(endpoint="tcp://127.0.0.1:1"))),
        )
    )


def unload(adapter_id: str) -> router_pb2.UnloadAdapterRequest:
    """Return the call that takes back what a case may have loaded."""
    return router_pb2.UnloadAdapterRequest(adapter_id=adapter_id)


def adapter(adapter_id: str, rank: int) -> types_pb2.Adapter:
    """Return an adapter."""
    return types_pb2.Adapter(adapter_id=adapter_id, rank=rank)
