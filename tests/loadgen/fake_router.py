"""A router that makes things up, on a real loopback socket: what the load generator is tested against.

The adapter id says what a request meets: `fail:STATUS` is refused, `short` gets a token too few, `endless` a stream
without a finish, `liar` a wrong usage, `held` waits for `gate`. All others get one message per token, `gap` seconds
apart (`tokens_per_message` at once if that is not 1).

    python tests/loadgen/fake_router.py [PORT]
"""

import asyncio
import sys

import grpc
import grpc.aio

from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2


async def after(seconds: float) -> None:
    done = asyncio.get_running_loop().create_future()
    handle = asyncio.get_running_loop().call_later(seconds, done.set_result, None)
    try:
        await done
    finally:
        handle.cancel()


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, *, time_scale=1.0, gap=0.0, first_gap=0.0, tokens_per_message=1):
        self.time_scale = time_scale
        self.gap, self.first_gap = gap, first_gap
        self.tokens_per_message = tokens_per_message
        self.gate = asyncio.Event()
        self.requests = []
        self.num_open = 0
        self.max_open = 0
        self.connected = True
        self.opened = asyncio.Condition()

    async def start(self, port=0):
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, self.server)
        self.target = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self.server.start()

    async def GetClusterStatus(self, request, context):  # noqa: N802
        worker = types_pb2.Worker(worker_id="w-0", gpu="A100", state=types_pb2.WORKER_STATE_READY)
        shard = router_pb2.Shard(
            address="s-0",
            connected=self.connected,
            model="Llama-2-7B",
            time_scale=self.time_scale,
            max_req_input_len=2048,
            max_req_total_len=3072,
            workers=[worker],
        )
        return router_pb2.GetClusterStatusResponse(shards=[shard])

    async def ListAdapters(self, request, context):  # noqa: N802
        adapters = [types_pb2.Adapter(adapter_id=f"lora-{index}", rank=8) for index in range(4)]
        return router_pb2.ListAdaptersResponse(adapters=adapters, model="Llama-2-7B")

    async def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            async with self.opened:
                self.opened.notify_all()
            async for response in self._answer(request, context):
                yield response
        finally:
            self.num_open -= 1

    async def _answer(self, request, context):
        kind, _, status = request.adapter_id.partition(":")
        if kind == "fail":
            await context.abort(grpc.StatusCode[status], f"{request.request_id} refused")
        if kind == "held":
            await self.gate.wait()
        sampling = request.sampling
        total = sampling.max_new_tokens if sampling.ignore_eos else request.true_output_tokens
        if kind == "short":
            total -= 1
        if self.first_gap:
            await after(self.first_gap)
        sent = 0
        while sent < total:
            if sent and self.gap:
                await after(self.gap)
            count = 1 if sent == 0 else min(self.tokens_per_message, total - sent)
            ids = [(request.seed + position) % 1905 + 3 for position in range(sent, sent + count)]
            sent += count
            response = router_pb2.GenerateResponse(token_ids=ids)
            if sent == total and kind != "endless":
                usage = types_pb2.Usage(
                    prompt_tokens=len(request.token_ids.ids),
                    completion_tokens=sent + (kind == "liar"),
                    cached_tokens=1,
                    queue_seconds=0.25,
                    adapter_load_seconds=0.125,
                    prefill_seconds=0.5,
                    decode_seconds=2,
                    worker_id="w-0",
                )
                response.finish.CopyFrom(router_pb2.Finish(reason=types_pb2.FINISH_REASON_LENGTH, usage=usage))
            yield response


async def main(port):
    router = FakeRouter(gap=0.01, first_gap=0.05)
    await router.start(port)
    print(router.target, flush=True)
    try:
        await router.server.wait_for_termination()
    finally:
        await router.server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
