"""A model of plain transformers, whose weights are given at each call, under the names of the files of its folder."""

import math
import re
import zlib
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

EXPERT = re.compile(r"(.*\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
TARGETS = {"qkv": ("q_proj", "k_proj", "v_proj"), "proj": ("o_proj",), "fc1": (*GATE, *UP), "fc2": DOWN}


def rounded(weight: Tensor, dtype: str) -> Tensor:
    """The weight as a model of this dtype has it; the gradient passes as if it were not rounded."""
    if dtype == "fp32":
        return weight
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return weight + (weight.detach().to(half).float() - weight.detach())


def end_tokens(folder: str, tokenizer) -> set[int]:
    """The tokens that end an answer."""
    read = transformers.GenerationConfig if Path(folder, "generation_config.json").exists() else transformers.AutoConfig
    ends = read.from_pretrained(folder).eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}


class Model:
    """Log-probs and entropies of answers. It has no weights of its own; `weights` are {name in the files: tensor}."""

    def __init__(self, folder: str):
        config = transformers.AutoConfig.from_pretrained(folder)
        self.module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        self.module.eval()
        self.module.model.embed_tokens.padding_idx = None  # transformers would drop that row's gradient
        self.config = config

    def answer_logp(
        self, weights: dict[str, Tensor], prompt: list[int], answer: dict, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy at each response token, [response], after `prompt`."""
        ids = torch.tensor(prompt + answer["response_ids"])
        inputs = {"input_ids": ids[None, :-1], "use_cache": False}
        output = torch.func.functional_call(self.module, module_weights(weights), args=(), kwargs=inputs)
        logp = (output.logits[0, len(prompt) - 1 :] / temperature).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, ids[len(prompt) :, None])[:, 0], entropy


def module_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the module: as in the files, but transformers 5 holds all experts of a layer in two tensors."""
    found = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, weight in weights.items():
        match = EXPERT.fullmatch(name)
        if match:
            layer, number, part = match.groups()
            experts.setdefault(layer, {}).setdefault(int(number), {})[part] = weight
        else:
            found[name.replace("block_sparse_moe.gate.", "mlp.gate.")] = weight
    for layer, by_number in experts.items():
        gate_up, down = [], []
        for number in sorted(by_number):
            parts = by_number[number]
            gate, up, last = (next(parts[n] for n in names if n in parts) for names in (GATE, UP, DOWN))
            gate_up.append(torch.cat([gate, up]))
            down.append(last)
        found[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        found[f"{layer}.mlp.experts.down_proj"] = torch.stack(down)
    return found


def read_weights(folder: str | Path, dtype: str, tied: bool) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder, in fp32 but with the values that a model of `dtype` has."""
    held = [item for file in sorted(Path(folder).glob("*.safetensors")) for item in load_file(file).items()]
    weights = {name: rounded(weight.float(), dtype) for name, weight in held}
    if tied:
        weights.pop("lm_head.weight", None)
    return weights


# ---------------------------------------------------------------- LoRA


def initial_factors(weights: dict[str, Tensor], lora: dict) -> dict[str, Tensor]:
    """The factors A [rank, in] and B [out, rank] of each adapted weight before training; A is drawn by its name."""
    chosen = [part for target in lora["targets"] for part in TARGETS[target]]
    factors = {}
    for name, weight in weights.items():
        stem = name.removesuffix("weight")
        if name.endswith(".weight") and stem.split(".")[-2] in chosen:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{stem}lora_A.weight".encode()))
            bound = 1 / math.sqrt(weight.shape[1])
            drawn = torch.empty(lora["rank"], weight.shape[1]).uniform_(-bound, bound, generator=generator)
            factors[f"{stem}lora_A.weight"] = drawn
            factors[f"{stem}lora_B.weight"] = torch.zeros(weight.shape[0], lora["rank"])
    return factors


def merge_factors(frozen: dict[str, Tensor], factors: dict[str, Tensor], lora: dict, dtype: str) -> dict[str, Tensor]:
    """The weights that the model computes with: W + alpha / rank · B A."""
    merged = dict(frozen)
    for name in factors:
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix("lora_A.weight")
            product = factors[f"{stem}lora_B.weight"] @ factors[name]
            merged[f"{stem}weight"] = rounded(frozen[f"{stem}weight"] + lora["alpha"] / lora["rank"] * product, dtype)
    return merged
