"""The profiler: which ranges the trace of a clock has."""

from config import ProfileConfig
from support.run.clock import Clock
from support.run.profiler import Profiler
from tests.conftest import ranges


def test_a_window_of_a_clock(world, tmp_path, capfd):
    profiler = Profiler(tmp_path / "traces", ProfileConfig(start=2, stop=3))
    clock = Clock(0, profiler)
    for step in range(1, 6):
        clock.start_step(step)
        for phase in ("rollout", "train", "train"):
            with clock(phase):
                pass
        clock.end_step()
        with clock("eval"), clock("rollout"):
            pass
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "steps_2_3_rank0.json.gz"
    phases = ["rollout", "train", "train", "eval", "rollout"]
    assert ranges(path) == ["ProfilerStep#2", *phases, "ProfilerStep#3", *phases]

    path.unlink()
    path.symlink_to("/dev/full")
    clock.start_step(2)
    clock.start_step(3)
    profiler.close()  # the run has ended
    assert "warning: profile: [Errno 28] No space left on device\n" in capfd.readouterr().err
    clock.stop()
