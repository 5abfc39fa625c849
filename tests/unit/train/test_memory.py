"""Peak memory is read from the system, and from the fallback where the system has no such file."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.unit.train.tiny_run import recipe_for
from trimtab.train import forecast as module
from trimtab.train.forecast import Forecast, compared, forecast
from trimtab.train.memory import (
    available_bytes,
    peak_memory_gib,
    resident_bytes,
    rusage_peak_bytes,
)
from trimtab.train.plan import plan_run


def test_linux_says_the_peak_of_this_process_alone(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t 9999999 kB\nVmHWM:\t 1048576 kB\nVmRSS:\t 5 kB\n")
    assert peak_memory_gib(status) == 1.0


@pytest.mark.parametrize("text", [None, "Name:\tpython\n"])
def test_without_that_number_getrusage_answers(tmp_path: Path, text: str | None) -> None:
    status = tmp_path / "status"
    if text is not None:
        status.write_text(text)
    assert 0.01 < peak_memory_gib(status) < 1000


def test_macos_counts_bytes_and_linux_kibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert rusage_peak_bytes("linux") == 1024 * usage.ru_maxrss
    assert rusage_peak_bytes("darwin") == usage.ru_maxrss


def test_resident_and_available_memory_are_read_where_linux_says_them(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("VmRSS:\t 5 kB\nMemAvailable:   7 kB\n")
    assert (resident_bytes(file), available_bytes(file)) == (5 * 1024, 7 * 1024)
    assert resident_bytes(tmp_path / "none") is None and available_bytes(tmp_path / "none") is None


def test_a_run_says_what_it_expects_and_warns_where_it_will_not_fit(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = recipe_for(tmp_path, checkpoint)
    large = recipe_for(tmp_path, checkpoint, "finetune.batch.tokens_per_step=8192",
                       "finetune.batch.micro_batch_tokens=8192")
    found = [forecast(recipe, plan_run(recipe)) for recipe in (small, large)]
    assert found[0] is not None and found[1] is not None
    assert found[1].steps - found[0].steps > 8064 * 32 * 4, "tokens cost at least their stream"
    (line,) = found[0].lines()
    assert "with the model loaded" in line and f"{found[0].peak_gib:.2f} GiB" in line
    tight = Forecast(2**30, 2**30, 2**29)
    assert [text.startswith("warning: the machine has 512.00 MiB left") for text in tight.lines()] == [
        False, True,
    ]
    assert compared(tight, 1.5) == "peak memory: 1.50 GiB, predicted 2.00 GiB"
    monkeypatch.setattr(module, "resident_bytes", lambda: None)
    assert forecast(small, plan_run(small)) is None and compared(None, 1.5) == "peak memory: 1.50 GiB"
