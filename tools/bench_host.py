"""The host's side of a step, without a model: seconds, memory, and how long the loop waits for files.

    torchrun --standalone --nproc_per_node=2 tools/bench_host.py [--samples 5120] [--tokens 2048] [--out FOLDER]

Made-up answers, as many on each rank, a quarter of each its prompt. For each part of a step the seconds of the slowest
rank and its CPU seconds, which tell more where other programs run; then, for each rank, the most memory until then
beyond what the process held before, in bytes a token of the whole step; rank 0 has the texts too. `lists` turns what an
engine gives into samples; `write` is what the loop waits until it goes on, `written` until the file is on the disk; of
the process that writes it the memory is given at the end.
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron_bridge as bridge
import train_grpo
from config import Config
from support.base import memory, ranks
from support.base.read_config import load_config
from support.base.rollout_files import RolloutWriter
from support.step.packing import to_micro_batches
from support.step.records import gather_samples

GROUP = 16  # answers of a prompt


def made_up(share: range, tokens: int) -> list:
    """Samples of the numbered answers, `tokens` tokens each, of lists as vLLM gives them."""
    rng = np.random.default_rng(share.start)
    samples = []
    for n in share:
        ids = rng.integers(0, 150_000, tokens).tolist()
        logps = rng.normal(-1, 0.5, tokens - tokens // 4).astype(np.float32).tolist()
        text = "wörd " * (len(logps) * 4 // 5)
        fields = {"reward": n % 3, "reward_parts": {"made_up": n % 3}}
        samples.append(
            train_grpo.Sample(n // GROUP, ids[: tokens // 4], ids[tokens // 4 :], logps, True, text, "", **fields)
        )
    return samples


class Parts:
    """Seconds and memory of one part after the other."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.held, _ = memory.resident_gb()
        self.began = self.now()
        memory.reset_peak()

    def end(self, part: str) -> None:
        """Say what the part took that began when the last one ended. All ranks call this."""
        taken = [now - then for now, then in zip(self.now(), self.began, strict=True)]
        beyond = (memory.resident_gb()[1] - self.held) * memory.GIB / self.tokens
        found = ranks.gather((*taken, beyond))
        if dist.get_rank() == 0:
            wall, cpu, beyond = zip(*found, strict=True)
            most = "  ".join(f"{bytes_a_token:7.1f}" for bytes_a_token in beyond)
            print(f"{part:8s} {max(wall):8.3f} s, {max(cpu):.3f} of CPU   {most} bytes a token", flush=True)
        self.began = self.now()

    @staticmethod
    def now() -> tuple[float, float]:
        """Seconds on the wall and of the CPU."""
        return time.perf_counter(), time.process_time()


def step(args: argparse.Namespace, cfg: Config, writer: RolloutWriter, out: Path) -> None:
    """What a step does with samples and rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = args.samples // world
    parts = Parts(each * world * args.tokens)
    samples = made_up(range(rank * each, (rank + 1) * each), args.tokens)
    parts.end("lists")
    samples, _ = gather_samples(samples, {})
    parts.end("gather")
    batch = train_grpo.flatten(samples)
    parts.end("flat")
    everything = list(range(len(samples)))
    micro_batches = to_micro_batches(batch, everything, cfg.train.max_tokens_per_micro_batch, cfg)
    parts.end("pack")
    del micro_batches
    batch = train_grpo.give_credit(samples, batch, cfg.algo)
    weights_F = train_grpo.loss_weights(batch.trained, batch.seq_id, everything, cfg.algo.loss_norm, 1)
    parts.end("credit")
    micro_batches = to_micro_batches(
        train_grpo.replace(batch, weights=weights_F), everything, cfg.train.max_tokens_per_micro_batch, cfg
    )
    parts.end("pack")
    if rank == 0:
        writer.write(out / "step_000001.jsonl", samples)
    parts.end("write")
    del micro_batches
    writer.finish()
    parts.end("written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5120)
    parser.add_argument("--tokens", type=int, default=2048, help="of each sample, its prompt included")
    parser.add_argument("--out", type=Path, help="folder for the file of samples; default: a temporary one")
    args = parser.parse_args()
    width = f"train.max_tokens_per_micro_batch={max(16384, args.tokens)}"
    cfg = load_config("configs/tiny.yaml", [width, "algo.advantage=dr_grpo"])
    ranks.init_distributed(timeout_s=600)
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    writer = RolloutWriter()
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder)
        if dist.get_rank() == 0:
            print(f"{args.samples} × {args.tokens} tokens on {dist.get_world_size()} ranks; memory of each rank")
        step(args, cfg, writer, out)
        if dist.get_rank() == 0:
            held = memory.resident_gb()
            child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
            size = (out / "step_000001.jsonl").stat().st_size
            print(f"the file: {size >> 20} MiB; the process that wrote it held {child >> 20} MiB at most")
            print(f"rank 0 holds {held[0]:.2f} GiB, at most {held[1]:.2f} GiB")
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
