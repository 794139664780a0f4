"""Kills at random moments change nothing; docs/dev/faults.md has the figures of a longer series (--kills 100)."""

import pytest

from tests.faults.torture import torture


@pytest.mark.slow
def test_kills_change_nothing(tiny, tmp_path, request):
    runs = request.config.getoption("--kills")
    inputs = [f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}"]
    counts = torture(tmp_path / "torture", runs, 2, inputs)
    print(counts)
    assert sum(counts["kills"].values()) >= runs, counts
