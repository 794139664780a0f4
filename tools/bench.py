"""Time the phases of a step, beside bare vLLM generating the same batch in the same run.

    torchrun --nproc_per_node=2 tools/bench.py [section.key=value ...]

Defaults: 8 prompts × 8 samples × 64 tokens, an untrained model of hidden size 128, feed-forward size 512 and 4 layers,
fp32, KL on, and an entropy bonus, since equal rewards alone give no gradient. Prints medians over 20 steps (after 3 to
warm up). Bare vLLM: `LLM.generate` on the same engines and as many prompts and samples, right after each step, without
log-probs, grading or training.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import make_tiny

import train_grpo
from config import Config
from support import checks, launch, ranks
from support.clock import Clock
from support.data import prompt_batch
from support.read_config import load_config

WARMUP, STEPS = 3, 20
PHASES = ("rollout", "reward", "logprob", "train", "sync", "step")


def config(folder: Path, overrides: list[str]) -> Config:
    """The benchmark's configuration; rank 0 has made the model and the data in `folder`."""
    (folder / "bench.yaml").touch()
    defaults = [
        f"output_dir={folder / 'out'}", f"model.path={folder / 'model'}", "model.dtype=fp32",
        f"data.train={folder / 'train.jsonl'}",
        "data.chat_template=false", "data.max_prompt_tokens=32", "rollout.prompts_per_step=8", "rollout.group_size=8",
        "rollout.max_new_tokens=64", "algo.kl_coef=0.05", "algo.entropy_coef=0.001", "train.lr=1e-4",
        f"train.steps={WARMUP + STEPS + 1}", "train.save_every=0",
        "train.max_tokens_per_micro_batch=4096", "train.logprob_max_tokens_per_micro_batch=4096",
    ]  # fmt: skip
    return load_config(str(folder / "bench.yaml"), [*defaults, *overrides])


def make_inputs(folder: Path) -> None:
    """A model with 1,024 tokens, so that an untrained one rarely samples the end token, and 64 short prompts."""
    texts = [
        f"Question {i}: what is {i * 37 % 101} + {i * 59 % 89}? Think, then answer with a number." for i in range(4096)
    ]
    tokenizer = make_tiny.bpe_tokenizer(texts, vocab_size=1024)
    make_tiny.save_model(folder / "model", tokenizer, hidden=128, layers=4, ffn=4)
    rows = [{"prompt": text[:40], "answer": "0"} for text in texts[:64]]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def bare_vllm_seconds(run: train_grpo.Run) -> float:
    """Wall time of this engine's share of the next step's batch, from the common start to the end of the slowest."""
    cfg, engine = run.cfg, run.engine
    r = cfg.rollout
    batch = prompt_batch(run.inputs.prompts, run.prompts_taken, r.prompts_per_step, cfg.seed)
    share = batch[dist.get_rank() // r.tp :: dist.get_world_size() // r.tp]
    params = engine.sampling_params(n=r.group_size, temperature=r.temperature, max_tokens=r.max_new_tokens)
    dist.barrier()
    start = time.perf_counter()
    engine.llm.generate([{"prompt_token_ids": prompt.ids} for prompt in share], params, use_tqdm=False)
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    ranks.join_ranks(timeout_s=600)
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    if dist.get_rank() == 0:
        make_inputs(folder)
    dist.barrier()
    cfg = config(folder, sys.argv[1:])
    checks.check_config(cfg, dist.get_world_size())
    cfg, inputs = launch.prepare(cfg, dist.get_world_size(), weights=True)  # prints the plan
    train_grpo.bridge.init_model_parallel(cfg.parallel, cfg.seed)
    run = train_grpo.build(cfg, inputs, Clock(stall_timeout_s=0))
    rows, bare = [], []
    for step in range(1, WARMUP + STEPS + 1):
        metrics, _ = train_grpo.train_step(run, step)
        seconds = bare_vllm_seconds(run)
        if step > WARMUP:
            rows.append(metrics)
            bare.append(seconds)
    run.grading.close()
    run.clock.stop()
    if dist.get_rank() == 0:
        r = cfg.rollout
        length = median(m["tokens/response_mean"] for m in rows)
        print(f"samples of {length:.1f} tokens; medians of {STEPS} steps, in seconds:")
        for phase in PHASES:
            print(f"  {phase:10s} {median(m[f'time/{phase}'] for m in rows):.3f}")
        print(f"  {'bare vLLM':10s} {median(bare):.3f}   ({r.prompts_per_step} × {r.group_size} samples)")
        print(f"step / bare vLLM: {median(m['time/step'] / b for m, b in zip(rows, bare, strict=True)):.2f}")


if __name__ == "__main__":
    main()
