"""A source reads the same tensors from a directory, a file and a URL, and refuses bad indexes."""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from trimtab import network
from trimtab.checkpoint import remote
from trimtab.checkpoint.marker import MARKER_NAME
from trimtab.checkpoint.source import INDEX_NAME, open_source
from trimtab.errors import ArchError, CheckpointError


def _sharded(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    save_file({"a": torch.arange(10.0)}, root / "one.safetensors")
    save_file({"b": torch.arange(6, dtype=torch.int32)}, root / "two.safetensors")
    _index(root, {"a": "one.safetensors", "b": "two.safetensors"})
    (root / "config.json").write_text('{"model_type": "x"}')
    return root


def _index(root: Path, weight_map: object) -> None:
    (root / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


class _RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files with byte ranges, which the standard handler ignores."""

    use_ranges = True

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if wanted is None or not path.is_file() or not self.use_ranges:
            super().do_GET()
            return
        body = path.read_bytes()[int(wanted[1]) : int(wanted[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class _NoRangeHandler(_RangeHandler):
    use_ranges = False


class _BusyHandler(_RangeHandler):
    """Answers 503 to the first requests for every file, of either method."""

    asked: ClassVar[Counter[str]] = Counter()

    def send_head(self) -> Any:
        self.asked[self.path] += 1
        if self.asked[self.path] <= 4:
            self.send_error(503)
            return None
        return super().send_head()


@pytest.fixture(params=[_RangeHandler])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    _sharded(tmp_path / "served")
    handler = partial(request.param, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/served"
    server.shutdown()
    thread.join()
    server.server_close()


def test_directory_file_and_memory_url_agree(tmp_path: Path) -> None:
    root = _sharded(tmp_path / "m")
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/source-test", recursive=True)
    local, far = open_source(root), open_source("memory://source-test")
    assert local.config() == far.config() == {"model_type": "x"}
    assert dict(local.entries()) == dict(far.entries())
    assert local.read("b") == far.read("b") == torch.arange(6, dtype=torch.int32).numpy().tobytes()
    assert local.read("a", 4, 8) == far.read("a", 4, 8) == torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert local.fingerprint() == far.fingerprint()
    assert list(open_source(root / "two.safetensors").entries()) == ["b"]


def test_http_reads_ranges_only(url: str) -> None:
    source = open_source(url)
    assert source.config() == {"model_type": "x"}
    assert source.read("a", 8, 4) == torch.tensor([2.0]).numpy().tobytes()
    assert source.files() == ("one.safetensors", "two.safetensors")


@pytest.mark.parametrize("url", [_NoRangeHandler], indirect=True)
def test_http_server_without_ranges_is_named(url: str) -> None:
    with pytest.raises(CheckpointError, match="must support ranges"):
        open_source(url).entries()


@pytest.mark.parametrize("url", [_BusyHandler], indirect=True)
def test_a_busy_http_server_is_no_missing_file(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_FIRST_PAUSE", 0.001)
    assert open_source(url).config() == {"model_type": "x"}
    monkeypatch.setattr(network, "ATTEMPTS", 1)
    _BusyHandler.asked.clear()
    with pytest.raises(CheckpointError, match="no answer: 503") as caught:
        open_source(url)
    assert caught.value.where == url


def test_modelscope_is_read_over_http(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "models" / "owner" / "name" / "resolve"
    place.mkdir(parents=True)
    (tmp_path / "served").rename(place / "master")
    monkeypatch.setattr(remote, "_MODELSCOPE", url.replace("served", "models"))
    assert open_source("modelscope://owner/name").read("a", 8, 4) == torch.tensor([2.0]).numpy().tobytes()
    assert list(open_source("modelscope://owner/name/two.safetensors").entries()) == ["b"]
    assert remote.modelscope_url("modelscope://o/n@v1/").endswith("/o/n/resolve/v1")
    with pytest.raises(CheckpointError, match="OWNER/NAME"):
        open_source("modelscope://name")


def test_several_files_without_index(tmp_path: Path) -> None:
    root = _sharded(tmp_path)
    (root / INDEX_NAME).unlink()
    assert sorted(open_source(root).entries()) == ["a", "b"]


def test_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    root = _sharded(tmp_path)
    before = open_source(root).fingerprint()
    save_file({"a": torch.arange(10.0) + 1}, root / "one.safetensors")
    assert open_source(root).fingerprint() != before


def test_many_experts_do_not_hide_another_projection(tmp_path: Path) -> None:
    found = set()
    for changed in (None, "layers.1.q_proj", "layers.0.norm"):
        names = [f"layers.{i}.experts.{e}.w1" for i in range(3) for e in range(1500)]
        names += [f"layers.{i}.{leaf}" for i in range(3) for leaf in ("q_proj", "norm")]
        root = tmp_path / str(changed)
        root.mkdir()
        tensors = {name: torch.full((2,), float(name == changed)) for name in names}
        save_file(tensors, root / "model.safetensors")
        found.add(open_source(root).fingerprint())
    assert len(found) == 3


def _error(root: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_source(root).entries()
    return caught.value


def test_index_names_a_missing_file(tmp_path: Path) -> None:
    root = _sharded(tmp_path)
    (root / "two.safetensors").unlink()
    error = _error(root)
    assert error.code == "TT302"
    assert "two.safetensors" in str(error)


def test_index_names_a_tensor_its_file_lacks(tmp_path: Path) -> None:
    root = _sharded(tmp_path)
    _index(root, {"a": "one.safetensors", "b": "one.safetensors"})
    assert _error(root).code == "TT302"


def test_same_tensor_in_two_files(tmp_path: Path) -> None:
    root = _sharded(tmp_path)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, root / "two.safetensors")
    error = _error(root)
    assert error.code == "TT308"
    assert "one.safetensors" in str(error)


@pytest.mark.parametrize("file", ["../m/one.safetensors", "/etc/x.safetensors", "", 3, "a\\b"])
def test_index_may_not_leave_the_directory(tmp_path: Path, file: object) -> None:
    root = _sharded(tmp_path / "m")
    _index(root, {"a": file})
    error = _error(root)
    assert error.code == "TT301"
    assert "inside the directory" in str(error)


def test_places_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        open_source(tmp_path).entries()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_source(tmp_path).config()
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ArchError, match="TT204"):
        open_source(tmp_path).config()


def test_unfinished_directory_is_refused(tmp_path: Path) -> None:
    root = _sharded(tmp_path)
    (root / MARKER_NAME).touch()
    with pytest.raises(CheckpointError) as caught:
        open_source(root)
    assert caught.value.code == "TT305"


def test_unknown_protocol() -> None:
    with pytest.raises(CheckpointError, match="nosuch"):
        open_source("nosuch://bucket/model")


@pytest.mark.parametrize(
    ("address", "package", "extra"),
    [("owner/name", "huggingface_hub", "hub"), ("obs://bucket/model", "s3fs", "s3"),
     ("modelscope://owner/name", "aiohttp", "http")],
)
def test_a_missing_package_is_named(
    address: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBS_ENDPOINT", "http://127.0.0.1:1")
    for loaded in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    for known in ("_registry", "registry"):  # what earlier tests have made fsspec load
        monkeypatch.setattr(sys.modules["fsspec.registry"], known, {})
    with pytest.raises(CheckpointError, match=package) as caught:
        open_source(address)
    assert caught.value.code == "TT604" and caught.value.hint == f"pip install 'trimtab[{extra}]'"
