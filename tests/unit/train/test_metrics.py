from __future__ import annotations

from contextlib import closing
from pathlib import Path

from trimtab.train.metrics import MetricsWriter, read_metrics


def test_rows_after_the_checkpoint_and_a_torn_line_are_removed_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with closing(MetricsWriter(path)) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss": step / 3})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    with closing(MetricsWriter(path, keep_through=2)) as metrics:
        metrics.write({"step": 3, "loss": 0.5})
    rows = list(read_metrics(path))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1]["loss"] == 2 / 3 and rows[2]["loss"] == 0.5


def test_a_row_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as metrics:
        metrics.write({"step": 1})
        assert list(read_metrics(path)) == [{"step": 1}]
