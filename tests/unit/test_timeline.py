"""The timeline: what a trace of a clock holds; whom the others wait for."""

import json

import pytest

from config import ProfileConfig
from support.run import clock
from support.run.timeline import Timeline
from support.step import metrics


def tracks_of(trace: dict) -> dict[str, list[dict]]:
    """{name of a track: its complete events, in order}; sees that a trace is what the format asks for."""
    names, tracks = {}, {}
    for event in trace["traceEvents"]:
        place = event["pid"], event["tid"]
        assert event["ph"] in "MX" and all(isinstance(part, int) for part in place)
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[place] = event["args"]["name"]
        elif event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"]
            tracks.setdefault(place, []).append(event)
    assert len(names) == len(set(names.values())) and names.keys() >= tracks.keys()
    return {names[place]: events for place, events in tracks.items()}


def check_phases(events: list[dict]) -> dict[int, float]:
    """Each step's phases follow one another and fill it; {step: seconds}."""
    seconds = {}
    for step in (event for event in events if event["name"].startswith("step ")):
        end = step["ts"] + step["dur"]
        inside = [e for e in events if e is not step and step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end + 1e-3]
        starts = [*(event["ts"] for event in inside), end]
        assert starts == pytest.approx([step["ts"], *(e["ts"] + e["dur"] for e in inside)], abs=1e-2), step  # µs
        seconds[step["args"]["step"]] = step["dur"] / 1e6
    return seconds


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
    (events,) = tracks_of(json.loads(path.read_text())).values()
    assert list(check_phases(events)) == [2, 3]
    updates = [(e["args"]["step"], e["args"]["number"]) for e in events if e["name"] == "train"]
    assert updates == [(2, 1), (2, 2), (3, 1), (3, 2)]
    assert sum(e["name"] == "eval" for e in events) == 1  # the one between them


def test_a_timeline_that_cannot_be_written_is_a_warning(timed, tmp_path, capfd):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/steps_3_4.json").symlink_to("/dev/full")
    timed(ProfileConfig(start=3, stop=90), last=4)  # the window ends with the run
    assert capfd.readouterr().err == ("warning: profile: no timeline was written: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("notes", "found"),
    [
        # The slowest samples until 10, grades until 12; the other is done at 6, waits 4 for the one, 2 for the other.
        ([(10, 2, 0), (5, 1, 1)], {"generation": 2.0, "grading": 1.0, "save": 0.5}),
        # It is done while the slowest grades.
        ([(10, 2, 0), (11, 0.5, 0)], {"generation": 0.0, "grading": 0.25, "save": 0.0}),
        ([(3, 1, 2)], {"generation": 0.0, "grading": 0.0, "save": 2.0}),
    ],
    ids=["both", "grading only", "one rank"],
)
def test_whom_the_others_wait_for(notes, found):
    rows = [{"rollout": rollout, "reward": reward, "wait": wait} for rollout, reward, wait in notes]
    assert metrics.idle_seconds(rows, bubble=0.125) == found | {"bubble": 0.125}
