"""The timeline: what a trace of a clock holds; whom the others wait for."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from config import ProfileConfig
from support.run import clock
from support.run.timeline import Timeline
from support.step import metrics


def tracks_of(path: Path) -> dict[str, list[dict]]:
    """{name of a track: its events, in order}."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return {name: [e for e in events if e["ph"] == "X" and e["tid"] == track] for track, name in names.items()}


@pytest.fixture
def timed(world, tmp_path):
    """timed(ProfileConfig(...), last step) → nothing; four steps of a clock, with two updates each, have passed."""

    def run(profile: ProfileConfig, last: int) -> None:
        timed = clock.Clock(0, Timeline(tmp_path / "traces", profile, last))
        for step in range(1, 5):
            timed.start_step(step)
            for phase in ("rollout", "gather", "train", "train"):
                with timed(phase):
                    pass
            timed.end_step()
            with timed("eval"), timed("rollout"):
                pass
        timed.stop()

    return run


def test_a_window_of_a_clock(timed, tmp_path, capsys):
    timed(ProfileConfig(start=2, stop=3), last=9)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "steps_2_3.json" and f"timeline: {path}" in capsys.readouterr().out
    (events,) = tracks_of(path).values()
    phases = ["rollout", "gather", "train", "train"]
    # "eval", between the steps, contains a phase too; an event comes before those that it contains.
    assert [e["name"] for e in events] == ["step 2", *phases, "eval", "rollout", "step 3", *phases]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(e for e in events if e["name"] in phases))


def test_a_timeline_that_cannot_be_written_is_a_warning(timed, tmp_path, capfd):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/steps_3_4.json").symlink_to("/dev/full")
    timed(ProfileConfig(start=3, stop=90), last=4)  # the window ends with the run
    assert capfd.readouterr().err == ("warning: profile: no timeline was written: [Errno 28] No space left on device\n")


def test_whom_the_others_wait_for():
    def idle(*notes: tuple[float, float, float]) -> list[float]:
        rows = [{"rollout": rollout, "reward": reward, "wait": wait} for rollout, reward, wait in notes]
        found = metrics.idle_seconds(rows, bubble=0.125)
        return [found[cause] for cause in ("generation", "grading", "save", "bubble")]

    # The slowest samples until 10, grades until 12; the other is done at 6, waits 4 for the one, 2 for the other.
    assert idle((10, 2, 0), (5, 1, 1)) == [2.0, 1.0, 0.5, 0.125]
    assert idle((10, 2, 0), (11, 0.5, 0)) == [0.0, 0.25, 0.0, 0.125]  # it is done while the slowest grades
    assert idle((3, 1, 2)) == [0.0, 0.0, 2.0, 0.125]  # one rank
