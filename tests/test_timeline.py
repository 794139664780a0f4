"""The timeline: what a trace holds, by hand and from a clock; whom the others wait for; windows that make no sense."""

import json
import math

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


def check_nesting(events: list[dict]) -> None:
    """Of two spans of a track, one holds the other or they are disjoint; phases are disjoint."""
    open_ends = []  # of the spans that hold the present one
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1][1] <= start + 1e-3:  # a ns
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1][1] + 1e-3, event
        assert not open_ends or open_ends[-1][0] in ("step", "eval"), f"{event['name']} inside {open_ends[-1][0]}"
        open_ends.append((event["name"].split()[0], end))


def check_sums(events: list[dict]) -> dict[int, float]:
    """Each step's phases fill it; {step: seconds}."""
    seconds = {}
    for step in (event for event in events if event["name"].startswith("step ")):
        inside = [e for e in events if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 1e-3]
        total = sum(e["dur"] for e in inside if e is not step)
        assert math.isclose(total, step["dur"], abs_tol=1.0), step  # µs
        seconds[step["args"]["step"]] = step["dur"] / 1e6
    return seconds


def test_a_trace_by_hand():
    """Rank 1's clock is 100 s ahead; rank 0 comes 0.5 s before it to the gather."""
    zero = [Span("rollout", 7, 1, 1.0, 2.0), Span("gather", 7, 1, 2.0, 2.75), Span("step", 7, 1, 1.0, 2.75)]
    one = [Span("rollout", 7, 1, 101.0, 102.5), Span("gather", 7, 1, 102.5, 102.75), Span("step", 7, 1, 101.0, 102.75)]
    trace = chrome_trace([zero, one], [0.0, 100.0], None)
    found = {name: [(e["name"], e["ts"], e["dur"]) for e in events] for name, events in tracks_of(trace).items()}
    rest = ("gather", 1.5e6, 0.25e6)
    assert found == {
        "rank 0": [("step 7", 0, 1.75e6), ("rollout", 0, 1e6), ("wait", 1e6, 0.5e6), rest],
        "rank 1": [("step 7", 0, 1.75e6), ("rollout", 0, 1.5e6), rest],
    }
    alone = chrome_trace([zero, one], [0.0, 100.0], [1])  # what rank 1 does not show, it still waited for
    assert tracks_of(alone) == {"rank 1": tracks_of(trace)["rank 1"]}


@pytest.fixture
def timed(world, tmp_path):
    """timed(ProfileConfig(...), last step) → a clock whose four steps, with two updates each, have passed."""
    clocks = []

    def one(profile: ProfileConfig, last: int = 9) -> clock.Clock:
        timeline = Timeline(tmp_path / "traces", profile, last) if profile.start else None
        clocks.append(clock.Clock(0, timeline))
        for step in range(1, 5):
            clocks[-1].start_step(step)
            for phase in ("rollout", "gather", "train", "train"):
                with clocks[-1](phase):
                    pass
            clocks[-1].end_step()
            with clocks[-1]("eval"), clocks[-1]("rollout"):
                pass
        return clocks[-1]

    yield one
    for made in clocks:
        made.stop()


def test_a_window_of_a_clock(timed, tmp_path, capsys):
    timed(ProfileConfig(start=2, stop=3))
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "steps_2_3.json" and f"timeline: {path}" in capsys.readouterr().out
    (events,) = tracks_of(json.loads(path.read_text())).values()
    check_nesting(events)
    assert list(check_sums(events)) == [2, 3]
    updates = [(e["args"]["step"], e["args"]["number"]) for e in events if e["name"] == "train"]
    assert updates == [(2, 1), (2, 2), (3, 1), (3, 2)]
    assert sum(e["name"] == "eval" for e in events) == 1  # the one between them


def test_a_window_beyond_the_end_closes_with_the_last_step(timed, tmp_path):
    timed(ProfileConfig(start=3, stop=90), last=4)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["steps_3_4.json"]


def test_a_timeline_that_cannot_be_written_is_a_warning(timed, tmp_path, capfd):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/steps_1_1.json").symlink_to("/dev/full")
    timed(ProfileConfig(start=1, stop=1))
    assert capfd.readouterr().err == ("warning: profile: no timeline was written: [Errno 28] No space left on device\n")


def test_without_a_window_a_clock_has_no_timeline(timed, tmp_path):
    assert timed(ProfileConfig()).timeline is None and not (tmp_path / "traces").exists()


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
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(machines.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"profile.memory=true: .* there is no GPU here"):
        machines.check_start(load_config(CONFIG, ["profile.start=1", "profile.stop=1", "profile.memory=true"]))
