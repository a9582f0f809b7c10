"""A cluster whose words come from logits, in a vocabulary that is not the shipped one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorrery.service.local.cluster import LocalCluster
from lorrery.v1 import router_pb2, types_pb2
from tests.cluster.client import TIMEOUT_SECONDS, Client, client_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster
from tests.tokenizer.test_words import ENGLISH, with_words

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

PROMPT = " tell me about the weather"
WORDS = with_words(ENGLISH[:1500])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One cluster for all."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    WORDS.model.save(str(folder / "tokenizer.json"))
    settings = (
        f"router.tokenizer='{folder}'",
        "worker.output.mode='logits'",
        "scheduler.worker_timeout_seconds=60",
        "time_scale=0.4",
    )
    async with running_cluster(folder, *settings, num_workers=2) as cluster:
        yield cluster
        await nothing_held(cluster)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    """Of that cluster."""
    async with client_of(cluster) as client:
        yield client


class Output:
    """One request's, as far as it has come."""

    def __init__(
        self, client: Client, seed: int = 1, text: str = PROMPT, adapter: str = "", **sampling: object
    ) -> None:
        asked = {"max_new_tokens": 60, "ignore_eos": True, **sampling}
        message = router_pb2.GenerateRequest(
            text=text, seed=seed, adapter_id=adapter, sampling=types_pb2.SamplingParams(**asked)
        )
        self.call = client.stub.Generate(message, timeout=TIMEOUT_SECONDS)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish = router_pb2.Finish()

    async def read(self, num_tokens: int = 10**9) -> "Output":
        while len(self.token_ids) < num_tokens and isinstance(
            message := await self.call.read(), router_pb2.GenerateResponse
        ):
            self.token_ids += message.token_ids
            self.text += message.text
            self.finish = message.finish
        return self


async def test_tokens_are_words_of_the_vocabulary_and_their_text_is_theirs(client: Client) -> None:
    output = await Output(client, do_sample=True, temperature=2.0, max_new_tokens=200).read()
    assert set(output.token_ids) <= set(WORDS.word_ids)
    assert len(set(output.token_ids)) > 20
    assert output.text == WORDS.model.decode(output.token_ids)
    ended = await Output(client, do_sample=True, ignore_eos=False, max_new_tokens=2000).read()
    assert ended.finish.reason == types_pb2.FINISH_REASON_EOS
    assert ended.token_ids[-1] == WORDS.eos_id
    assert ended.text == WORDS.model.decode(ended.token_ids[:-1])


async def test_greedy_is_the_same_for_every_seed_and_another_for_every_prompt(client: Client) -> None:
    asks = [{"seed": 1}, {"seed": 2}, {"do_sample": True, "top_k": 1}, {"seed": 3, "temperature": 2.0}]
    outputs = await asyncio.gather(
        *(Output(client, **ask, ignore_eos=False, max_new_tokens=500).read() for ask in asks)
    )
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    others = await asyncio.gather(Output(client, text=" hello").read(), Output(client, adapter="lora-1").read())
    assert len({tuple(output.token_ids[:20]) for output in [outputs[0], *others]}) == 3


async def test_parameters_show(client: Client) -> None:
    asks = [
        *({"do_sample": True, "temperature": temperature} for temperature in (0.2, 1.0, 4.0)),
        {"do_sample": True, "temperature": 4.0, "top_p": 0.3},
        {"do_sample": True, "temperature": 4.0, "top_k": 2},
        {"do_sample": True, "temperature": 0.2, "presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {},
    ]
    outputs = await asyncio.gather(*(Output(client, max_new_tokens=200, **ask).read() for ask in asks))
    cold, warm, hot, top_p, top_k, penalised, frequency, greedy = (len(set(output.token_ids)) for output in outputs)
    assert cold < warm < hot
    assert max(top_p, top_k) < hot
    assert penalised > cold
    assert frequency > greedy


async def test_a_stop_string_ends_the_output_on_the_worker(client: Client) -> None:
    sampling = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 400}
    whole = await Output(client, seed=9, **sampling).read()
    stop = WORDS.model.decode(whole.token_ids[30:32])
    output = await Output(client, seed=9, stop_sequences=[stop], **sampling).read()
    assert output.text == whole.text[: whole.text.index(stop)]
    assert output.finish.reason == types_pb2.FINISH_REASON_STOP
    assert output.finish.usage.completion_tokens == len(output.token_ids) <= 32


async def test_a_killed_workers_sequences_go_on_with_the_same_words(cluster: LocalCluster, client: Client) -> None:
    sampling = {"do_sample": True, "presence_penalty": 0.5, "frequency_penalty": 0.5, "max_new_tokens": 250}
    before = await asyncio.gather(*(Output(client, seed, **sampling).read() for seed in range(4)))
    # The same, but none ends while this process waits for a core.
    outputs = [Output(client, seed, **sampling | {"max_new_tokens": 3000}) for seed in range(4)]
    await asyncio.gather(*(output.read(20) for output in outputs))
    cluster.kill("worker-0")
    await asyncio.gather(*(output.read(250) for output in outputs))
    assert [output.token_ids[:250] for output in outputs] == [output.token_ids for output in before]
    assert await scrape(cluster, "scheduler", "lorrery_scheduler_requeued_sequences_total") > 0
    for output in outputs:
        output.call.cancel()
    await cluster.restart("worker-0")
