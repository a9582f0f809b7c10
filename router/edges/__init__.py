"""Edges over the same `Call` as the router's own gRPC and OpenAI's routes: one line of a table each.

| file | contents |
|---|---|
| `anthropic/`, `responses/` | Anthropic's Messages and OpenAI's Responses, text only; `as_chat.py` is what both share |
| `slora.py` | S-LoRA's routes, and llm-mock's `/generate` |
| `engines/` | vLLM's and SGLang's gRPC |
| `structured_output/` | outputs of a given form |
| `tools.py` | calls of tools |

A module here is imported only where its routes or its port are served.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lorrery.router.settings import Protocol

DIALECTS = (
    "lorrery.router.http.openai",
    "lorrery.router.edges.responses.routes",
    "lorrery.router.edges.anthropic.routes",
    "lorrery.router.http.vllm",
    "lorrery.router.edges.slora",
)
"""Modules of the HTTP edge, in the order of its schema. Each has `routes(edge)`, which returns its routes."""


class GrpcProtocol(NamedTuple):
    """A protocol of an engine port.

    Attributes:
        module: has `register(engine, server)`, which adds its services to a server and returns their names.
        extra: brings its messages; None: they are ours.
    """

    module: str
    extra: str | None = None


PROTOCOLS: Mapping[Protocol, GrpcProtocol] = {
    "vllm": GrpcProtocol("lorrery.router.edges.engines.vllm"),
    "smg-vllm": GrpcProtocol("lorrery.router.edges.engines.smg_vllm", "engines"),
    "sglang": GrpcProtocol("lorrery.router.edges.engines.smg_sglang", "engines"),
}
