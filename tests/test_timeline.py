"""The timeline: what a trace holds, by hand and from a clock; whom the others wait for; windows that make no sense."""

import json

import pytest

from config import ProfileConfig, UserError
from support.base.read_config import load_config
from support.check import checks, machines
from support.run import clock
from support.run.timeline import Span, Timeline, chrome_trace
from support.step import metrics
from tests.conftest import REPO

CONFIG = str(REPO / "configs/tiny.yaml")


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


def test_a_trace_by_hand():
    """Rank 1's clock is 100 s ahead; rank 0 comes 0.5 s before it to the gather."""
    zero = [Span("rollout", 7, 1, 1.0, 2.0), Span("gather", 7, 1, 2.0, 2.75), Span("step", 7, 1, 1.0, 2.75)]
    one = [Span("rollout", 7, 1, 101.0, 102.5), Span("gather", 7, 1, 102.5, 102.75), Span("step", 7, 1, 101.0, 102.75)]
    tracks = [(1.0, zero), (101.0, one)]
    trace = chrome_trace(tracks, None)
    found = {name: [(e["name"], e["ts"], e["dur"]) for e in events] for name, events in tracks_of(trace).items()}
    rest = ("gather", 1.5e6, 0.25e6)
    assert found == {
        "rank 0": [("step 7", 0, 1.75e6), ("rollout", 0, 1e6), ("wait", 1e6, 0.5e6), rest],
        "rank 1": [("step 7", 0, 1.75e6), ("rollout", 0, 1.5e6), rest],
    }
    alone = chrome_trace(tracks, [1])  # what rank 1 does not show, it still waited for
    assert tracks_of(alone) == {"rank 1": tracks_of(trace)["rank 1"]}


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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["profile.start=4", "profile.stop=3"], "profile.start=4 is after profile.stop=3"),
        (["profile.torch=true"], "profile.start=0: there is no timeline"),
        (["profile.start=1", "profile.stop=1", "profile.ranks=[0,2]"], "there are only ranks 0 to 1"),
    ],
)
def test_windows_that_make_no_sense(overrides, said):
    with pytest.raises(UserError, match=said):
        checks.check_config(load_config(CONFIG, overrides), world_size=2)


def test_there_is_no_snapshot_without_a_gpu(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(machines.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"profile.memory=true: .* there is no GPU here"):
        machines.check_start(load_config(CONFIG, ["profile.start=1", "profile.stop=1", "profile.memory=true"]))
