"""Time the phases of a step beside what this machine can do, measured in the same run.

    torchrun --nproc_per_node=2 benchmarks/ours.py                                  # the work tiny-64
    torchrun --nproc_per_node=2 benchmarks/ours.py --work small-bf16-natural --csv bench.csv
    torchrun --nproc_per_node=8 benchmarks/ours.py --model qwen2.5-7b --dtype bf16 --tokens 1024 parallel.tp=2 ...

A work is a model with random weights, a dtype, lengths and the most tokens of an answer (works.py). Each
step has 8 prompts × 8 samples and a KL to a reference; overrides (section.key=value) change anything. Medians over the
steps after warm-up. MFU is the operations of a phase (grpo/step/metrics.py) ÷ its seconds ÷ ranks ÷ the rate that
matmuls of the model's shapes reach, in the same run with all ranks busy. Bare vLLM: `LLM.generate` on the same engines
for as many prompts and samples, right after each step, without log-probs, grading or training.
"""

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron_bridge as bridge
import train_grpo
from benchmarks import works
from benchmarks.works import GROUP, KL, LR, PHASES, PROMPTS, WORKS, Work
from config import Config, UserError
from grpo.parts.base import ranks, versions
from grpo.parts.base.read_config import load_config
from grpo.parts.data.prompts import prompt_batch
from grpo.run import launch
from grpo.run.clock import Clock
from grpo.run.preflight import configuration
from grpo.step.metrics import train_flops

MICRO_BATCH = 4096  # tokens


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works.add_options(parser)
    parser.add_argument("--model", choices=works.MODELS, help="its shape; this and the next two change --work")
    parser.add_argument("--dtype", choices=bridge.DTYPES)
    parser.add_argument("--tokens", type=int, dest="max_tokens", help="longest answer")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args()


def chosen_work(args: argparse.Namespace) -> Work:
    given = {name: getattr(args, name) for name in ("model", "dtype", "max_tokens")}
    return replace(WORKS[args.work], **{name: value for name, value in given.items() if value is not None})


def config(work: Work, steps: int, overrides: list[str]) -> Config:
    """The benchmark's configuration; rank 0 makes model and data."""
    model, data = ranks.gather(works.make_inputs(work) if dist.get_rank() == 0 else None)[0]
    works.FOLDER.mkdir(parents=True, exist_ok=True)
    (works.FOLDER / "bench.yaml").touch()

    room = max(MICRO_BATCH, work.prompt_tokens + work.max_tokens)
    chat = str(work.model == "smollm2").lower()
    defaults = [
        f"output_dir={works.FOLDER / 'out'}", f"model.path={model}", f"model.dtype={work.dtype}",
        f"data.train={data}", f"data.chat_template={chat}",
        f"data.max_prompt_tokens={work.prompt_tokens}",
        f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={GROUP}",
        f"rollout.max_new_tokens={work.max_tokens}", "reward.default=custom",
        f"reward.custom={works.__file__}:checksum", f"algo.kl_coef={KL}", f"train.lr={LR}",
        f"train.steps={steps + 1}", "train.save_every=0",
        f"train.max_tokens_per_micro_batch={room}", f"train.logprob_max_tokens_per_micro_batch={room}",
    ]  # fmt: skip
    return load_config(str(works.FOLDER / "bench.yaml"), [*defaults, *overrides])


# ---------------------------------------------------------------- ceilings


def rate(amount: float, action, seconds: float = 0.5) -> float:
    """`amount` per second of the slowest rank, for an action that all ranks repeat at once; median of repeats."""
    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    in_flight = 20 if on_gpu else 1  # one action alone would be timed with its launch

    action()
    wait()  # the first is slower
    taken, start = [], time.perf_counter()
    for _ in range(50):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(in_flight):
            action()
        wait()
        taken.append((time.perf_counter() - began) / in_flight)
        if ranks.on_any_rank(time.perf_counter() - start > seconds and len(taken) > 2):
            break

    slowest = torch.tensor(median(taken), dtype=torch.float64, device=bridge.device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return amount / slowest.item()


def matmul_rate(work: Work, rows: int) -> float:
    """Operations/s of a rank, all busy: `rows` tokens with the matrices of the model, each as often as it is met."""
    shape = works.MODELS[work.model]
    dtype, device = bridge.DTYPES[work.dtype], bridge.device()
    flops = seconds = 0.0
    for out, inp, times in works.matmuls(shape):
        a = torch.randn(rows, inp, device=device).to(dtype)
        b = torch.randn(out, inp, device=device).to(dtype)
        one = 2.0 * rows * out * inp
        flops += one * times
        seconds += one * times / rate(one, lambda a=a, b=b: a @ b.T, 0.2)
    return flops / seconds


def bare_vllm(run: train_grpo.Run) -> float:
    """Tokens/s of all engines on as many samples as a step has, from the common start to the end of the slowest."""
    cfg, engine = run.cfg, run.engine
    r = cfg.rollout
    batch = prompt_batch(run.inputs.prompts, run.prompts_taken, r.prompts_per_step, cfg.seed)
    share = batch[dist.get_rank() // r.tp :: dist.get_world_size() // r.tp]
    params = engine.sampling_params(n=r.group_size, temperature=r.temperature, max_tokens=r.max_new_tokens)

    dist.barrier()
    start = time.perf_counter()
    outputs = engine.llm.generate([{"prompt_token_ids": prompt.ids} for prompt in share], params, use_tqdm=False)
    dist.barrier()
    seconds = time.perf_counter() - start

    own = 0
    if dist.get_rank() % r.tp == 0:  # the ranks of an engine have the same answers
        own = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return sum(ranks.gather(own)) / seconds


# ---------------------------------------------------------------- a run, and what it says


def measure(args: argparse.Namespace, work: Work, cfg: Config) -> tuple[list[dict], list[int]]:
    """(a row of results for each timed step, lengths of all their answers)."""
    cfg, inputs = launch.prepare(cfg, dist.get_world_size(), weights=True)  # prints the plan
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    run = train_grpo.build(cfg, inputs, Clock(stall_timeout_s=0))

    rows, lengths = [], []
    for step in range(1, args.warmup + args.steps + 1):
        metrics, samples, _ = train_grpo.train_step(run, step)
        row = {"step": step - args.warmup, **step_results(metrics, samples, work)}
        row["bare_tokens_per_s"] = bare_vllm(run)
        if step > args.warmup:
            rows.append(row)
            lengths += [len(s.response_ids) for s in samples]

    run.grading.close()
    run.clock.stop()
    run.engine.sleep()

    # The rate with the memory that the run has given back.
    sizes = (2048, 8192) if torch.cuda.is_available() else (min(MICRO_BATCH, 2048),)
    peak = max(matmul_rate(work, rows) for rows in sizes)
    return [row | {"matmul_flops_per_s": peak} for row in rows], lengths


def step_results(metrics: dict, samples: list, work: Work) -> dict:
    row = {"tokens_per_s": metrics["speed/response_tokens_per_s"], "step_s": metrics["time/step"]}
    for phase in PHASES:
        row[f"{phase}_s"] = metrics[f"time/{phase}"]
        row[f"{phase}_peak_gib"] = metrics[f"mem/{phase}_peak_gb"] or 0.0
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
    attended = sum(length**2 for length in lengths)
    row["train_flops"] = train_flops(SimpleNamespace(**works.MODELS[work.model]), sum(lengths), attended)
    return row


def main() -> int:
    args = parse_args()
    work = chosen_work(args)
    ranks.join_ranks(timeout_s=600)
    rank, world = dist.get_rank(), dist.get_world_size()  # now: an engine that is given up may end the process group

    try:
        cfg = config(work, args.warmup + args.steps, args.overrides)
        configuration.check_config(cfg, world)
        rows, lengths = measure(args, work, cfg)
    except UserError as error:
        if rank == 0:
            ranks.say(f"error: {error}")
        return 2

    if rank == 0:
        system = "ours" if cfg.train.share_prompts else "ours-unshared"
        about = {**asdict(work), "system": system, "round": args.round, "ranks": world}
        about |= {**works.facts(), "commit": versions.commit()}
        rows = [about | row for row in rows]
        for name, value in works.summary(rows).items():
            print(f"{name:26}{value:>12.4g}")
        print(f"answers of {sum(lengths) / len(lengths):.1f} tokens, the longest {max(lengths)}")
        if args.csv:
            works.add_results(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
