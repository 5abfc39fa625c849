"""Converting from and to a real S3 server whose connections drop, stall and answer 503."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.object_store import Proxy, proxy, s3_server
from tests.unit.checkpoint import tiny
from tests.unit.checkpoint.test_convert import MEMORY, files_of
from trimtab import network
from trimtab.arch.load import load_arch
from trimtab.checkpoint import remote
from trimtab.checkpoint.audit import audit_conversion
from trimtab.checkpoint.convert import Report, plan_conversion, write_plan
from trimtab.checkpoint.layout import Degrees, rank_layout
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.output import open_output
from trimtab.checkpoint.source import open_source
from trimtab.errors import CheckpointError

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCY"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def store(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy as the S3 endpoint of this process."""
    with proxy(server) as before:
        url = f"http://127.0.0.1:{before.server_port}"
        for key, value in {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
            "OBS_ENDPOINT": url,
        }.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr(network, "_FIRST_PAUSE", 0.01)
        s3fs.S3FileSystem.clear_instance_cache()
        yield before
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "model"
    config = tiny.k3_config()
    del config["vision_config"]
    config["text_config"].update(num_hidden_layers=1, first_k_dense_replace=0, num_experts=2)
    config["text_config"]["linear_attn_config"].update(kda_layers=[1], full_attn_layers=[])
    tiny.make(folder, config)
    return folder


def upload(model: Path, bucket: str) -> str:
    system = s3fs.S3FileSystem()
    system.mkdir(bucket)
    for path in model.iterdir():
        system.put_file(str(path), f"{bucket}/model/{path.name}")
    return f"s3://{bucket}/model"


def convert(src: str | Path, dst: str | Path) -> Report:
    source = open_source(src)
    layout = rank_layout(load_arch(source.config()), Degrees(ep=2, tp=2))
    plan = plan_conversion(source, layout)
    return write_plan(plan, open_output(dst), memory=MEMORY)


def kinds(method: str, number: int) -> str | None:
    """Many reads fail, in all ways."""
    if method != "GET":
        return None
    return {0: "503", 3: "drop", 6: "slow"}.get(number % 9) if number % 50 < 27 else None


def test_from_a_failing_store(store: Proxy, model: Path, tmp_path: Path) -> None:
    url = upload(model, "reading")
    convert(model, tmp_path / "local")
    store.failures = kinds
    convert(url, tmp_path / "remote")
    assert all(store.failed[kind] > 2 for kind in ("503", "drop", "slow"))
    assert files_of(tmp_path / "remote") == files_of(tmp_path / "local")


def test_to_a_failing_store_and_back(store: Proxy, model: Path) -> None:
    upload(model, "writing")
    store.failures = lambda method, number: "503" if method == "PUT" and number % 4 == 1 else None
    report = convert(model, "s3://writing/converted")
    assert report.finished and store.failed["503"] > 2
    store.failures = kinds
    verdicts = audit_conversion(open_source(model), "s3://writing/converted")
    assert all(verdict.passed for verdict in verdicts)
    first, _ = load_model(model)
    second, _ = load_model("s3://writing/converted")
    assert all(
        tiny.bit_equal(tensor, second.state_dict()[name])
        for name, tensor in first.state_dict().items()
    )
    assert convert(model, "s3://writing/converted").written == 0
    with pytest.raises(CheckpointError, match="already holds something"):
        convert(model, "s3://writing/model")


def test_a_store_that_fails_for_good_leaves_what_is_finished(store: Proxy, model: Path) -> None:
    upload(model, "breaking")
    store.failures = lambda method, number: "503" if method == "PUT" and number > 8 else None
    with pytest.raises(CheckpointError) as caught:
        convert(model, "s3://breaking/converted")
    assert caught.value.code == "TT314" and "breaking/converted" in caught.value.where
    store.failures = lambda method, number: None
    with pytest.raises(CheckpointError, match="TT305"):
        open_source("s3://breaking/converted")
    report = convert(model, "s3://breaking/converted")
    assert report.finished and report.resumed > 0
    names = {path.rsplit("/", 1)[-1] for path in s3fs.S3FileSystem().ls("breaking/converted")}
    manifest = json.loads(s3fs.S3FileSystem().cat_file("breaking/converted/manifest.json"))
    assert names == {*manifest["files"], "manifest.json"}


def test_obs_is_read_through_its_s3_endpoint(
    store: Proxy, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(model, "huawei")
    options: dict[str, Any] = remote.obs_options("obs://huawei/model")
    assert options["config_kwargs"]["s3"]["addressing_style"] == "virtual"
    # Names of buckets do not resolve on loopback.
    monkeypatch.setattr(remote, "_OBS_ADDRESSING", "path")
    assert len(open_source("obs://huawei/model").entries()) == len(open_source(model).entries())
    monkeypatch.delenv("OBS_ENDPOINT")
    with pytest.raises(CheckpointError, match="OBS_ENDPOINT"):
        open_source("obs://huawei/model")


def test_secrets_stay_out_of_messages_and_files(
    store: Proxy, model: Path, tmp_path: Path
) -> None:
    url = upload(model, "secret")
    convert(url, tmp_path / "c")
    written = b"".join(files_of(tmp_path / "c").values())
    assert SECRET.encode() not in written and b"AKIDEXAMPLE" not in written
    store.failures = lambda method, number: "503"
    with pytest.raises(CheckpointError) as caught:
        open_source(url)
    assert SECRET not in caught.value.message and caught.value.__cause__ is None
    with pytest.raises(CheckpointError) as caught:
        open_source("http://me:hunter2@127.0.0.1:1/model?X-Amz-Signature=abcdef").config()
    shown = caught.value.message
    assert "hunter2" not in shown and "abcdef" not in shown and "127.0.0.1" in shown
