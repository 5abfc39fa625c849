"""Peak memory is read from the system, and from the fallback where the system has no such file."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from trimtab.train.memory import peak_memory_gib, rusage_peak_bytes


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
