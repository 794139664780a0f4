"""A model of plain transformers, whose weights are given at each call, under the names of the files of its folder."""

import math
import operator
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

EXPERT = re.compile(r"(.*\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
IN = ("q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
TARGETS = {"qkv": IN, "proj": ("o_proj", "out_proj"), "fc1": (*GATE, *UP), "fc2": DOWN}
POSITIONS, LOGITS = 2**13, 2**26  # of a batch, at most

Weights = dict[str, Tensor]


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
        config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
        self.module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
        )
        self.module.eval()
        self.module.model.embed_tokens.padding_idx = None  # transformers would drop that row's gradient
        self.config = config

    def batches(self, prompts: list[list[int]], responses: list[list[int]]) -> Iterator[list[int]]:
        """Numbers of the answers that `answers_logp` takes at once: as many as memory holds, of like length."""
        batch, tokens = [], 0
        for n in sorted(range(len(prompts)), key=lambda n: len(prompts[n]) + len(responses[n])):
            tokens += len(responses[n])
            positions = (len(batch) + 1) * (len(prompts[n]) + len(responses[n]))  # it is the longest row
            if batch and (positions > POSITIONS or tokens * self.config.vocab_size > LOGITS):
                yield batch
                batch, tokens = [], len(responses[n])
            batch.append(n)
        yield batch

    def answers_logp(
        self, weights: Weights, prompts: list[list[int]], responses: list[list[int]], temperature: float
    ) -> list[tuple[Tensor, Tensor]]:
        """Log-prob and entropy at each response token, [response] each, of the answers of a batch; a row for each."""
        device = next(iter(weights.values())).device
        named = module_weights(weights).items()
        own = {name.removeprefix("model.").removeprefix("language_model."): weight for name, weight in named}
        head = own.pop("lm_head.weight", own["embed_tokens.weight"])
        rows = [torch.tensor(both) for both in map(operator.add, prompts, responses)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # a row does not see what is after it
        inputs = {"input_ids": ids, "use_cache": False}
        hidden = torch.func.functional_call(self.module.model, own, args=(), kwargs=inputs).last_hidden_state
        sizes = list(map(len, responses))
        row_M = [n for n, size in enumerate(sizes) for _ in range(size)]
        place_M = [len(prompts[n]) - 1 + i for n, size in enumerate(sizes) for i in range(size)]
        targets = torch.tensor([token for response in responses for token in response], device=device)
        logps = (hidden[row_M, place_M] @ head.T / temperature).log_softmax(-1)
        entropies = -(logps.exp() * logps).sum(-1)
        chosen = logps.gather(-1, targets[:, None])[:, 0]
        return list(zip(chosen.split(sizes), entropies.split(sizes), strict=True))


def module_weights(weights: Weights) -> Weights:
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


def read_weights(folder: str | Path, dtype: str, tied: bool, device: torch.device | str = "cpu") -> Weights:
    """The tensors of all safetensors files of a folder, in fp32 but with the values that a model of `dtype` has."""
    held = [item for file in sorted(Path(folder).glob("*.safetensors")) for item in load_file(file).items()]
    held = [(name, weight) for name, weight in held if not name.startswith(("model.visual.", "mtp."))]
    weights = {name: rounded(weight.to(device, torch.float32), dtype) for name, weight in held}
    if tied:
        weights.pop("lm_head.weight", None)
    return weights


# ---------------------------------------------------------------- LoRA


def initial_factors(weights: Weights, lora: dict) -> Weights:
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


def merge_factors(frozen: Weights, factors: Weights, lora: dict, dtype: str) -> Weights:
    """The weights that the model computes with: W + alpha / rank · B A."""
    merged = dict(frozen)
    for name in factors:
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix("lora_A.weight")
            product = factors[f"{stem}lora_B.weight"] @ factors[name]
            merged[f"{stem}weight"] = rounded(frozen[f"{stem}weight"] + lora["alpha"] / lora["rank"] * product, dtype)
    return merged
