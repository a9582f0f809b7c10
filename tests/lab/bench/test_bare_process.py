"""The reference programs serve: what they send is received."""

import asyncio

import pytest

from lab.bench import bare_steps
from lab.bench.bare_stream import BareClient, bare_server
from lorrery.service.network.channel import open_channel
from lorrery.service.settings.sections import TlsSettings

pytestmark = pytest.mark.cluster


async def test_a_bare_stream_sends_a_message_per_period() -> None:
    received = asyncio.Event()
    async with bare_server() as (address, _):
        client = BareClient(address)
        reading = asyncio.create_task(client.receive(0.01, 100, lambda _num: received.set()))
        await asyncio.wait((reading, waiting := asyncio.create_task(received.wait())), return_when="FIRST_COMPLETED")
        assert waiting.done(), reading.exception()
        reading.cancel()
        await asyncio.wait((reading,))
        await client.close()


async def test_a_relay_sends_on_what_a_sender_writes() -> None:
    async with bare_steps.bare_relay(100) as (address, _), bare_steps.bare_sender(address, 0.01, 100):
        channel = open_channel(address, TlsSettings())
        call = bare_steps.stream(channel, bare_steps.READ)
        message = await call.read()
        assert message == bytes(100)
        call.cancel()
        await channel.close()
