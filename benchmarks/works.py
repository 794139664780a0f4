"""What is benchmarked, for ours.py and theirs.py alike: models, lengths, works, and where results go.

Knows no trainer: this file is also imported where TRL is installed and Megatron-core is not. Weights are random, except
in smollm2, whose answers end as the model ends them.
"""

import argparse
import datetime
import json
import math
import os
import platform
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas
import torch

REPO = Path(__file__).resolve().parent.parent
PROMPTS, GROUP = 8, 8  # of a step: 8 prompts × 8 samples
KL, LR = 0.05, 1e-6  # a reference is there; weights hardly move, so that lengths stay what they are
FOLDER = REPO / "build/bench"  # of models, data and logs


@dataclass(frozen=True)
class Work:
    """One thing to time; max_tokens bounds an answer."""

    model: str = "tiny"
    dtype: str = "fp32"
    lengths: str = "fixed"  # a key of END_CHANCE; smollm2 ends its answers itself
    max_tokens: int = 64
    prompt_chars: int = 40  # 2.8 of them make a token

    @property
    def prompt_tokens(self) -> int:
        """No prompt has more tokens."""
        return max(64, self.prompt_chars // 2)


WORKS = {
    "tiny-64": Work(),
    "tiny-128-64": Work(prompt_chars=352),  # prompts of 128 tokens, answers of 64
    "tiny-512-256": Work(max_tokens=256, prompt_chars=1420),
    "tiny-natural": Work(lengths="natural", max_tokens=192),
    "tiny-tail": Work(lengths="tail", max_tokens=1000),
    "small-fp32-64": Work("small"),
    "small-bf16-64": Work("small", "bf16"),
    "small-bf16-128-64": Work("small", "bf16", prompt_chars=352),
    "small-bf16-natural": Work("small", "bf16", "natural", 192),
    "smollm2-natural": Work("smollm2", "bf16", "addition", 40),  # the task of configs/smollm2.yaml
    "smollm2-natural-fp16": Work("smollm2", "fp16", "addition", 40),
    "smollm2-long": Work("smollm2", "bf16", "questions", 256, prompt_chars=352),  # prompts of about 128 tokens
}
SMOLLM2 = REPO / "build/smollm2/model"


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # torch's names
# Chance that a token ends the answer: lengths are all the same, of mean 59 (cut at 192), of mean 199 (up to 1,000).
END_CHANCE = {"fixed": 1e-9, "natural": 1 / 64, "tail": 1 / 200}

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6}
LLAMA = {**QWEN2, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 1e5}
QWEN3_MOE = {**QWEN2, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}


def sizes(hidden, layers, heads, kv_heads, ffn, vocab, tied, **more) -> dict:
    """The entries of config.json that say how large a model is."""
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": hidden // heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768, "hidden_act": "silu", "initializer_range": 0.02, "eos_token_id": 0,
        **more,
    }  # fmt: skip


def experts(width: int) -> dict:
    return {
        "max_position_embeddings": 40960, "moe_intermediate_size": width, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 128,
    }  # fmt: skip


# Those below "small" as their config.json on the hub has them (Qwen/Qwen2.5-0.5B ..., Qwen/Qwen3-30B-A3B ...).
MODELS = {
    "tiny": QWEN2 | sizes(128, 4, 4, 2, 512, 1024, True),
    "small": QWEN2 | sizes(512, 8, 16, 2, 2048, 512, True),
    "smollm2": LLAMA | sizes(576, 30, 9, 3, 1536, 49152, True),
    "qwen2.5-0.5b": QWEN2 | sizes(896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": QWEN2 | sizes(1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-7b": QWEN2 | sizes(3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": QWEN2 | sizes(5120, 48, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": QWEN2 | sizes(5120, 64, 40, 8, 27648, 152064, False),
    "qwen2.5-72b": QWEN2 | sizes(8192, 80, 64, 8, 29568, 152064, False),
    "qwen3-30b-a3b": QWEN3_MOE | sizes(2048, 48, 32, 4, 6144, 151936, False) | experts(768),
    "qwen3-235b-a22b": QWEN3_MOE | sizes(4096, 94, 64, 4, 12288, 151936, False) | experts(1536),
}

# ---------------------------------------------------------------- models


def matmuls(c: dict) -> list[tuple[int, int, int]]:
    """(outputs, inputs, times a token) of the matrices that a token is multiplied by: layers, then the output layer."""
    import torch
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**c))
    table = Counter()
    for weight in model.model.layers.parameters():
        if weight.dim() > 1:  # three: of all experts
            table[weight.shape[-2:]] += c["num_experts_per_tok"] if weight.dim() == 3 else 1
    return [(*shape, times) for shape, times in table.items()] + [(c["vocab_size"], c["hidden_size"], 1)]


def make_model(folder: Path, work: Work):
    """Write the folder of an untrained model that ends an answer with the chance that `work.lengths` has.

    Channel 0 of the residual stream is a constant so large that the last norm makes it sqrt(hidden) everywhere; the end
    token alone does not see it, so its logit is the others' plus a constant. The others differ little: sampling
    is nearly uniform.
    """
    import torch
    import transformers

    from tools import make_tiny

    c = MODELS[work.model]
    large, chance = 1024.0, END_CHANCE[work.lengths]
    bias = math.log(chance / (1 - chance) * (c["vocab_size"] - 1))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
        config = transformers.AutoConfig.for_model(**c)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPES[work.dtype]))
        for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
            embedding.weight[:, 0] = large
        model.get_output_embeddings().weight[c["eos_token_id"], 0] = 0
        model.model.norm.weight[0] = -bias / (large * math.sqrt(c["hidden_size"]))
    model.save_pretrained(folder)
    tokenizer = make_tiny.bpe_tokenizer(TEXTS, vocab_size=min(c["vocab_size"], 1024))
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


# ---------------------------------------------------------------- data and results

TEXTS = [
    f"Question {i}: what is {i * 37 % 101} + {i * 59 % 89}? Think, then answer with a number." for i in range(4096)
]


def make_inputs(work: Work) -> tuple[Path, Path]:
    """(model folder, data file) of a work, made where they are missing. Raises SystemExit where SmolLM2 is."""
    model = FOLDER / f"{work.model}-{work.dtype}-{work.lengths}"
    data = FOLDER / f"{work.lengths}-{work.prompt_chars}.jsonl"
    prompts = [" ".join(TEXTS[first:])[: work.prompt_chars] for first in range(64)]
    if work.model == "smollm2":
        from tools import make_smollm2

        model = SMOLLM2
        if work.lengths == "addition":
            prompts = [row["prompt"] for row in make_smollm2.addition_rows()[0]]
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
        if not model.exists():
            raise SystemExit(f"{model} is missing: make {model.relative_to(REPO)}")
    elif not (model / "tokenizer.json").exists():  # it is written last
        make_model(model, work)
    FOLDER.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps({"prompt": prompt, "answer": "0"}) + "\n" for prompt in prompts))
    return model, data


def checksum(text: str, answer: str = "", row: dict | None = None) -> float:
    """A reward in [0, 1] that means nothing and differs between answers, so that every gradient is one."""
    return zlib.crc32(text.encode()) / 2**32


def add_options(parser: argparse.ArgumentParser):
    parser.add_argument("--work", choices=WORKS, default="tiny-64", help="what to time")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=6, help="that are timed")
    parser.add_argument("--csv", type=Path, help="file to add this run to")
    parser.add_argument("--round", type=int, default=1, help="number of the run, for --csv")


# A results file is CSV, a row for each timed step; what is known of the whole run stands in each of its rows.
PHASES = ("rollout", "reward", "logprob", "train", "sync")
COLUMNS = [
    "model", "dtype", "lengths", "max_tokens", "prompt_chars", "system", "setting", "round", "ranks", "date", "machine",
    "commit", "step", "tokens_per_s", "step_s", "train_flops", "bare_tokens_per_s", *(f"{phase}_s" for phase in PHASES),
    *(f"{phase}_peak_gib" for phase in PHASES), "matmul_flops_per_s",
]  # fmt: skip


def read_results(path: Path) -> pandas.DataFrame:
    """The rows of a results file, none where there is no file; NaN is what a system does not measure."""
    return pandas.read_csv(path) if path.exists() else pandas.DataFrame(columns=COLUMNS)


def add_results(path: Path, rows: list[dict]):
    """Append rows to a results file; numbers get six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pandas.DataFrame(rows, columns=COLUMNS)
    table.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.6g")


def summary(rows: list[dict]) -> dict[str, float]:
    """{name: median, of peaks the maximum} of what a table shows of one run of ours; names are units as well."""
    table = pandas.DataFrame(rows)
    middle = table.median(numeric_only=True)
    shown = {"tokens/s": middle.tokens_per_s, "step s": middle.step_s}
    for phase in PHASES:
        shown[f"{phase} s"] = middle[f"{phase}_s"]
        shown[f"{phase} peak GiB"] = table[f"{phase}_peak_gib"].max()
    shown["matmul flops/s"] = middle.matmul_flops_per_s
    # Share of the operations of forward and backward: the reference makes a forward pass, a third of them.
    for phase, column, share in (("train", "train_s", 1), ("log-probs", "logprob_s", 1 / 3), ("step", "step_s", 4 / 3)):
        peak = table.matmul_flops_per_s * table.ranks
        mfu = (share * table.train_flops / table[column] / peak).median()
        if mfu > 1:
            raise ValueError(f"MFU of {phase} {mfu:.0%}: the matmul rate of {peak[0]:.3g} flops/s is too low")
        shown[f"MFU of {phase} %"] = 100 * mfu
    shown["bare vLLM tokens/s"] = middle.bare_tokens_per_s
    return shown | {"step ÷ bare vLLM": middle.bare_tokens_per_s / middle.tokens_per_s}


def facts() -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    units = torch.backends.cpu.get_cpu_capability()  # AVX2, AVX512, ...: they decide whether equal bits are on
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"date": now, "machine": f"{len(os.sched_getaffinity(0))} cores of {cpu}, {units}"}
