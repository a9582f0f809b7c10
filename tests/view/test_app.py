"""The page's routes, over real sockets."""

import asyncio
import contextlib
import gzip
import json
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from lorrery.service.errors import FormatError, LorreryError
from lorrery.view import frame as f
from lorrery.view.app import view_of
from lorrery.view.model import Model
from lorrery.view.record import Record, Recorder, joined
from tests.cluster.harness import wait_until
from tests.view.fake import HOSTILE, FakeCluster, FakeFeed, fake_record, serve
from tests.view.test_notices import at


@contextlib.asynccontextmanager
async def served(source) -> AsyncIterator[str]:
    address = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(source, started=address.set_result))
    try:
        yield await address
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def get(address: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    def ask():
        request = urllib.request.Request(f"http://{address}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, dict(response.headers), response.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    return await asyncio.to_thread(ask)


class Events:
    """Reads server-sent events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: str) -> None:
        self._reader, self.writer, self.headers = reader, writer, headers
        self._gzip = zlib.decompressobj(16 + zlib.MAX_WBITS) if "content-encoding: gzip" in headers else None
        self._text = b""

    async def next(self) -> tuple[str, dict]:
        while b"\n\n" not in self._text:
            size = int((await self._reader.readline()).strip(), 16)
            chunk = await self._reader.readexactly(size + 2)
            self._text += chunk[:-2] if self._gzip is None else self._gzip.decompress(chunk[:-2])
        event, _, self._text = self._text.partition(b"\n\n")
        kind, data = event.split(b"\n", 1)
        return kind.decode().removeprefix("event: "), json.loads(data.removeprefix(b"data: "))


@contextlib.asynccontextmanager
async def events(address: str, query: str = "?hz=20", encoding: str = "identity") -> AsyncIterator[Events]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET /events{query} HTTP/1.1\r\nhost: x\r\naccept-encoding: {encoding}\r\n\r\n".encode())
        headers = (await reader.readuntil(b"\r\n\r\n")).decode()
        yield Events(reader, writer, headers)
    finally:
        writer.close()


@pytest.mark.parametrize("encoding", ["identity", "gzip, br"])
async def test_a_live_feed_is_a_hello_and_then_frames(encoding: str):
    async with served(FakeFeed(2)) as address, events(address, encoding=encoding) as stream:
        assert (await stream.next())[0] == "hello"
        kind, first = await stream.next()
        assert kind == "frame"
        assert first["adapters_new"]
        assert len(first["workers"]) == 2
        later = (await stream.next())[1]
        assert later["at"] > first["at"]
        assert not set(later["adapters_new"]) & set(first["adapters_new"])
        assert (await get(address, "/hello"))[2].startswith(b'{"source":"live"')


async def test_a_view_comes_where_asked_for():
    async with served(FakeFeed(2)) as address, events(address, "?view=true") as stream, events(address) as plain:
        viewed, raw = [[await one.next() for _ in range(2)][1][1] for one in (stream, plain)]
    assert viewed["view"]["running"] > 0
    assert "view" not in raw


async def test_a_view_outlives_the_watch_that_breaks():
    made = iter([at(0.0), at(1.0), at(2.0, workers=[])])

    class Breaking(FakeFeed):
        async def frames(self, hz: float = 10.0) -> AsyncIterator[f.Frame]:
            for frame in (next(made), next(made)) if self.num_watchers == 0 else made:
                self.num_watchers = 1
                yield frame
            raise LorreryError("gone")

    async with served(Breaking()) as address, events(address, "?view=true") as stream:
        kinds, last = [], {}
        while kinds.count("frame") < 3:
            kind, last = await stream.next()
            kinds.append(kind)
    assert kinds == ["hello", "frame", "frame", "problem", "hello", "frame"]
    assert [notice["title"] for notice in last["view"]["notices"]] == ["worker-0 has been gone for 0 s"]


async def test_watchers_come_and_go_and_each_has_all_names():
    feed = FakeFeed(2)
    async with served(feed) as address:
        async with events(address) as one, events(address) as other:
            for stream in (one, other):
                await stream.next()
                assert (await stream.next())[1]["adapters_new"]
            assert feed.num_watchers == 2
        await wait_until(lambda: feed.num_watchers == 0)


async def test_a_watch_that_breaks_is_told_and_begun_again():
    async with served(FakeFeed(2, fails_after=2)) as address, events(address) as stream:
        kinds = [(await stream.next())[0] for _ in range(6)]
    assert kinds == ["hello", "frame", "frame", "problem", "hello", "frame"]


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/events?hz=50", 400, "hz is 50"),
        ("/events?hz=x", 400, "must be a number"),
        ("/events?view=1", 400, "must be true or false"),
        ("/record", 404, "live"),
        ("/nothing-there", 404, "Not Found"),
        ("/../frame.py", 404, "Not Found"),
    ],
)
async def test_what_is_not_to_be_had_is_said_in_words(path: str, status: int, word: str):
    async with served(FakeFeed(2)) as address:
        found, headers, body = await get(address, path)
        assert (found, word in json.loads(body)["error"]) == (status, True)
        assert "default-src 'self'" in headers["content-security-policy"]


async def test_a_cluster_that_does_not_answer_is_an_error_in_words():
    class Silent(FakeFeed):
        async def hello(self):
            raise LorreryError("no cluster there")

    async with served(Silent()) as address, events(address) as stream:
        assert await stream.next() == ("problem", {"message": "no cluster there"})
        assert (await get(address, "/hello"))[::2] == (503, b'{"error":"no cluster there"}')


async def test_a_record_is_served_whole_or_in_part(tmp_path: Path):
    record = fake_record(tmp_path / "frames.ndjson.gz", 10, 0.5)
    hello = record.hello
    assert (hello.source, hello.first, hello.last, hello.frame_seconds) == ("record", 0.0, 10.0, 0.5)
    assert Record(tmp_path).hello == hello  # in a folder
    async with served(record) as address:
        plain = (await get(address, "/record"))[2]
        _, headers, packed = await get(address, "/record", **{"Accept-Encoding": "gzip"})
        assert headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed) == plain
        assert len(packed) < len(plain) / 3
        lines = plain.splitlines()
        assert f.decode_hello(lines[0]) == hello
        frames = [f.decode_frame(line) for line in lines[1:]]
        assert frames == list(record.frames())
        assert len(frames) == 21
        part = [f.decode_frame(line) for line in (await get(address, "/record?from=5&to=6"))[2].splitlines()[1:]]
        assert [frame.at for frame in part] == [5.0, 5.5, 6.0]
        names = [name for frame in frames if frame.at <= 5 for name in frame.adapters_new]
        assert part[0].adapters_new == names
        assert set(names) & set(HOSTILE)
        viewed = (await get(address, "/record?view=true"))[2].splitlines()
        assert viewed[0] == lines[0]
        assert [f.decode_frame(line) for line in viewed[1:]] == frames
        model = Model(hello)
        for line, frame in zip(viewed[1:], frames, strict=True):
            model.apply(frame)
            assert msgspec.json.encode(json.loads(line)["view"]) == msgspec.json.encode(view_of(model))
        assert (await get(address, "/events"))[0] == 404
        assert (await get(address, "/record?from=x"))[0] == 400


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "first line is not a hello"),
        (b"{}\n", "first line is not a hello"),
        (f.encode(f.Hello("live", "m", "t", "v")), "source 'live'"),
        (gzip.compress(b"x" * 1000, mtime=0)[:20], "cut off or damaged"),
    ],
)
def test_what_is_no_record_is_said_in_words(tmp_path: Path, content: bytes, word: str):
    path = tmp_path / "frames.ndjson.gz"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=word):
        Record(path)


def test_a_record_that_is_not_there_is_said_in_words(tmp_path: Path):
    with pytest.raises(LorreryError, match=r"no frames\.ndjson\.gz there; `lorrery simulate --record` makes one"):
        Record(tmp_path)
    with pytest.raises(LorreryError, match="no such file"):
        Record(tmp_path / "x")


def test_a_long_run_is_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lorrery.view.record.MAX_FRAMES", 8)
    cluster, recorder, names = FakeCluster(3), Recorder(), []
    for _ in range(30):
        cluster.advance(recorder.next_at - cluster.at)
        recorder.add(cluster.frame())
    names = list(cluster._told_adapters)
    recorder.write(tmp_path / "r", f.Hello("record", "m", "t", "v"))
    record = Record(tmp_path / "r")
    every, frames = record.hello.frame_seconds, list(record.frames())
    assert every > Recorder.FIRST_EVERY
    assert len(frames) <= 8
    assert [frame.at for frame in frames] == [n * every for n in range(len(frames))]
    assert [name for frame in frames for name in frame.adapters_new] == names


def test_a_record_for_a_pipe_goes_through_it(tmp_path: Path):
    recorder, hello, pipe = Recorder(), f.Hello("record", "m", "t", "v"), tmp_path / "pipe"
    recorder.add(FakeCluster(1).frame())
    recorder.write(tmp_path / "file", hello)
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.read_bytes)
        recorder.write(pipe, hello)
        assert written.result(60) == (tmp_path / "file").read_bytes()
    assert pipe.is_fifo()


def test_two_frames_become_one():
    cluster = FakeCluster(3)
    cluster.advance(1)
    one = cluster.frame()
    cluster.advance(30)
    two = cluster.frame()
    both = joined(one, two)
    assert both.adapters_new == one.adapters_new + two.adapters_new
    assert len(both.ended) <= f.MAX_ENDED
    assert len(both.ended) + both.ended_more == (len(one.ended) + one.ended_more + len(two.ended) + two.ended_more)
    assert both.workers == two.workers
