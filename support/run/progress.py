"""How far a run is, where its wall-clock time goes, and how busy its GPU is; on rank 0 alone, from steps that ended."""

import contextlib
import threading
import time
from collections import deque
from statistics import fmean

import torch

RECENT = 20  # steps from which the time left is estimated


class Progress:
    """Call `add` as each step is logged. `prompts`: of data.train; `sampled`: prompts that the steps before took."""

    def __init__(self, steps: int, prompts: int, sampled: int):
        self.steps = steps
        self.prompts = prompts
        self.sampled = sampled
        self.walls = deque(maxlen=RECENT)  # seconds from one logged step to the next
        self.gpu = GpuUse()
        self.eval_seconds = 0.0
        self.start = self.last = time.monotonic()

    def add(self, metrics: dict) -> dict[str, float | None]:
        """The metrics that the step gets from here."""
        now = time.monotonic()
        evaluation = metrics.get("time/eval", 0.0)
        self.walls.append(now - self.last)
        self.sampled += metrics["groups/sampled"]
        self.eval_seconds += evaluation
        numbers = {
            "epoch": self.sampled / self.prompts,
            "time/between": max(self.walls[-1] - metrics["time/step"] - evaluation, 0.0),
            "time/left": (self.steps - metrics["step"]) * fmean(self.walls),
            "time/eval_frac": self.eval_seconds / max(now - self.start, 1e-9),
            "gpu/busy": self.gpu.read_mean(),
        }
        self.last = now
        return numbers


class GpuUse:
    """The share of time in which this process's GPU runs a kernel, as NVML reports it, read once a second."""

    def __init__(self):
        self.readings: list[float] = []
        self.nvml = None
        if torch.cuda.is_available():
            from vllm.third_party import pynvml

            with contextlib.suppress(pynvml.NVMLError):  # no NVML, no right to it, or a part of a GPU: no metric
                pynvml.nvmlInit()
                self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
                self.nvml = pynvml
                threading.Thread(target=self.read_always, daemon=True).start()

    def read_always(self) -> None:
        """Add a reading each second, as long as NVML answers."""
        with contextlib.suppress(self.nvml.NVMLError):
            while True:
                self.readings.append(self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100)
                time.sleep(1.0)

    def read_mean(self) -> float | None:
        """The mean since the last call; None where there is no reading."""
        readings, self.readings = self.readings, []
        return fmean(readings) if readings else None
