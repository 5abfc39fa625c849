"""Images behind URLs, from a server of this machine: fetched once, within limits, and kept."""

from __future__ import annotations

import hashlib
import http.server
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.pictures import file_bytes, image_record, picture
from trimtab import network
from trimtab.config.data import DataSection
from trimtab.data import fetch, image_source
from trimtab.data.image_source import ImageSource
from trimtab.data.images import VisionRule
from trimtab.data.prompt import ImageProcessor
from trimtab.data.stream import DataStream
from trimtab.data.tokenizer import Tokenizer
from trimtab.errors import DataError, RunError

pytest.importorskip("aiohttp")

AT = "d.jsonl:7: messages[0].content[0]"
PAD = 267
IMAGE = file_bytes(picture(28, 28))


class Server(http.server.BaseHTTPRequestHandler):
    """Answers by path, and counts what it is asked."""

    asked: Counter[str]

    def do_GET(self) -> None:
        kind = self.path.partition("?")[0].lstrip("/").partition("/")[0]
        self.asked[kind] += 1
        if kind == "busy" and self.asked[kind] < 3:
            self.send_error(503)
        elif kind in ("good", "busy", "other"):
            self.give(IMAGE)
        elif kind == "text":
            self.give(b"<html>")
        elif kind == "cut":
            self.give(IMAGE[:-40])
        elif kind == "long":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(IMAGE + bytes(1000))  # without a length
        elif kind == "slow":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(IMAGE[:10])
            self.wfile.flush()
            time.sleep(0.6)
        elif kind == "moved":
            self.send_to("/good")
        elif kind == "circle":
            self.send_to("/circle")
        elif kind == "file":
            self.send_to("file:///etc/hosts")
        else:
            self.send_error(404)

    def give(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_to(self, place: str) -> None:
        self.send_response(302)
        self.send_header("Location", place)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Counter[str]]]:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(network, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(fetch, "_failed", {})
    handler = type("Counting", (Server,), {"asked": Counter()})
    host = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=host.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{host.server_port}", handler.asked
    host.shutdown()
    thread.join()
    host.server_close()


Served = tuple[str, "Counter[str]"]


def source(url: str) -> ImageSource:
    return image_source.image_source({"image_url": {"url": url}}, AT, ".")


def kept(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").rglob("*") if path.is_file()]


def test_an_image_is_fetched_once_and_kept_by_its_url(server: Served, tmp_path: Path) -> None:
    url, asked = server
    named = f"{url}/good/a.png?token=7"
    for _ in range(2):
        assert source(named).size(fetch=True) == (28, 28)
        got = source(named).read(fetch=True)
        assert np.array_equal(np.asarray(got), np.asarray(picture(28, 28)))
    assert asked["good"] == 1
    (file,) = kept(tmp_path)
    assert file.name == hashlib.sha256(named.encode()).hexdigest() and file.read_bytes() == IMAGE
    source(f"{url}/good/a.png?token=8").read(fetch=True)
    assert asked["good"] == 2 and len(kept(tmp_path)) == 2


def test_without_the_option_the_message_names_it(server: Served) -> None:
    url, asked = server
    with pytest.raises(DataError, match=r"good\?\*\*\* is an address; finetune\.data\.image\.fetch") as caught:
        source(f"{url}/good?token=secret").read()
    assert caught.value.where == AT and "secret" not in caught.value.message
    assert not asked


def test_a_busy_server_is_asked_again_and_a_redirect_followed(server: Served) -> None:
    url, asked = server
    assert source(f"{url}/busy").read(fetch=True).size == (28, 28)
    assert asked["busy"] == 3
    assert source(f"{url}/moved").read(fetch=True).size == (28, 28)


@pytest.mark.parametrize(
    ("place", "said", "times"),
    [("gone", "the server answers 404", 1), ("text", "gives is not an image file", 1),
     ("cut", "gives cannot be decoded", 1), ("long", "has more than 900 bytes", 1),
     ("other", "has more than 900 bytes", 1), ("slow", "too slow", fetch.ATTEMPTS),
     ("circle", "redirects 5 times in a row", fetch.MAX_REDIRECTS),
     ("file", "redirects to something other than http", 1)],
)  # fmt: skip
def test_what_cannot_be_used_is_named_without_its_query_and_not_kept(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, said: str, times: int
) -> None:
    url, asked = server
    monkeypatch.setattr(fetch, "SILENCE_SECONDS", 0.2)
    if place in ("long", "other"):
        assert len(IMAGE) > 900
        monkeypatch.setattr(image_source, "MAX_FILE_BYTES", 900)
    for where in ("d.jsonl:1", AT):  # the second is told without asking
        with pytest.raises(DataError, match=said) as caught:
            replace(source(f"{url}/{place}/a.png?token=secret"), where=where).read(fetch=True)
    assert caught.value.code == "TT406" and caught.value.where == AT
    assert f"{url}/{place}/a.png?***" in caught.value.rule
    assert "secret" not in caught.value.message
    assert asked[place] == times and kept(tmp_path) == []


def test_no_server_and_no_address(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "ATTEMPTS", 2)
    with pytest.raises(DataError, match=r"a\.png cannot be fetched: no answer"):
        source("http://127.0.0.1:1/a.png").read(fetch=True)
    with pytest.raises(DataError, match="no valid address"):
        source("http://[broken/a.png").read(fetch=True)
    with pytest.raises(DataError, match="a kind that is not read"):
        source("ftp://127.0.0.1/a.png")


def test_a_cache_that_cannot_be_written_stops_the_run(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "taken"))
    with pytest.raises(RunError, match="cannot be read or written: Not a directory") as caught:
        source(f"{server[0]}/good").read(fetch=True)
    assert caught.value.code == "TT314"


def test_epochs_read_the_kept_bytes_and_a_lost_image_is_a_broken_record(
    server: Served, tokenizer: Tokenizer, jsonl: Callable[[str, Iterable[object]], str]
) -> None:
    url, asked = server
    places = ("good/1", "gone/2", "good/3")
    path = jsonl("d.jsonl", [image_record("r", "9", f"{url}/{place}.png") for place in places])
    packs = []
    for on_error in ("skip", "skip", "error"):
        data = DataSection.model_validate({
            "domain": {"path": path}, "domain_ratio": 1.0, "general_ratio": 0.0, "max_seq_len": 64,
            "on_error": on_error, "image": {"fetch": True},
        })  # fmt: skip
        processor = ImageProcessor(VisionRule(), PAD, data.image)
        stream = DataStream(data, tokenizer, 3, 320, processor)
        if on_error == "skip":
            packs += [stream.next_pack() for _ in range(4)]
            assert stream.counts["domain"].skipped >= 2  # two passes or more
            (line,) = stream.counts["domain"].left_out.first()
            assert line.startswith(f"{path}:2: {url}/gone/2.png cannot be fetched: the server answers 404")
            assert asked["good"] == 2
        else:
            with pytest.raises(DataError, match="404") as caught:
                for _ in range(4):
                    stream.next_pack()
            assert f"{path}:2" in caught.value.message and f"{url}/gone/2.png" in caught.value.message
    assert asked["gone"] == 1
    assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in zip(packs[:4], packs[4:], strict=True))
