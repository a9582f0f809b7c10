"""A request for many outputs: its prompts are encoded once each, and not all in one go."""

import asyncio
from contextlib import suppress

import pytest

from lorrery.router.http import edge
from lorrery.service.tasks import Turns
from lorrery.tokenizer.file import BuiltinTokenizer
from tests.router.http.conftest import StartHttp, refusal

TOO_LONG = " about" * 1000


async def test_a_list_of_prompts_lets_others_on_the_event_loop_run_between_two_of_them(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_iterations = 0
    begun_at: list[int] = []
    encode = BuiltinTokenizer.encode_prompt

    async def count() -> None:
        nonlocal num_iterations
        while True:
            num_iterations += 1
            await asyncio.sleep(0)

    def noted(self: BuiltinTokenizer, text: str, **further: bool) -> list[int]:
        begun_at.append(num_iterations)
        return encode(self, text, **further)

    monkeypatch.setattr(BuiltinTokenizer, "encode_prompt", noted)
    monkeypatch.setattr(edge, "Turns", lambda: Turns(0.0))  # a turn is over after one prompt
    router = await start_http(scheduler={"max_req_input_len": 900, "max_req_total_len": 1200})
    other = asyncio.create_task(count())
    async with router.connection() as connection:
        body = {"prompt": [*[f"prompt {number}" for number in range(50)], TOO_LONG]}
        status, error = await refusal(connection, "/v1/completions", body)
    other.cancel()
    with suppress(asyncio.CancelledError):
        await other
    assert (status, error["param"]) == (400, "input_tokens")
    assert len(begun_at) == 51
    assert len(set(begun_at)) == 51


@pytest.mark.parametrize("further", [{}, {"echo": True}])
async def test_a_prompt_is_encoded_once_however_many_outputs_it_has(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, further: dict[str, object]
) -> None:
    encoded: list[str] = []
    encode = BuiltinTokenizer.encode_prompt

    def noted(self: BuiltinTokenizer, text: str, **further: bool) -> list[int]:
        encoded.append(text)
        return encode(self, text, **further)

    monkeypatch.setattr(BuiltinTokenizer, "encode_prompt", noted)
    router = await start_http(scheduler={"max_req_input_len": 900, "max_req_total_len": 1200})
    async with router.connection() as connection:
        for path, prompt in (("/v1/completions", ["a", "b", TOO_LONG]), ("/generate", TOO_LONG)):
            encoded.clear()
            status, error = await refusal(connection, path, {"prompt": prompt, "n": 8, **further})
            assert status == 400
            assert "give a shorter prompt" in error["message"]
            assert encoded == (prompt if isinstance(prompt, list) else [prompt])
