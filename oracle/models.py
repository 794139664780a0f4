"""A model of plain transformers, whose weights are given at each call, under the names of the files of its folder."""

import contextlib
import itertools
import math
import re
import zlib
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from oracle.nuclei import cut

EXPERT = re.compile(r"(.*\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
TARGETS = {  # of adapters → the names of their weights
    "qkv": ("q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "proj": ("o_proj", "out_proj"),
    "fc1": ("gate_proj", "up_proj", "w1", "w3"),
    "fc2": ("down_proj", "w2"),
}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOGITS = 2**26  # of a batch, at most, if all its tokens had them


class Model:
    """Log-probs and entropies of answers. It has no weights of its own; `weights` are {name in the files: tensor}."""

    def __init__(self, folder, dtype="fp32"):
        """In another `dtype` than fp32 what each layer gives is rounded to it, and so is the gradient there."""
        self.config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
        self.module = transformers.AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
        )
        self.module.eval()
        self.module.model.embed_tokens.padding_idx = None  # transformers would drop that row's gradient
        if dtype != "fp32":
            for part in self.module.modules():
                if not [*part.children()]:
                    part.register_forward_hook(partial(round_output, HALF[dtype]))

    def batches(self, prompts, responses):
        """Numbers of the answers that go through the model at once: as many as memory holds, of like length."""
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        left = sorted(range(len(lengths)), key=lengths.__getitem__)
        while left:
            size = max(1, LOGITS // (lengths[left[-1]] * self.config.vocab_size))
            yield left[-size:]
            del left[-size:]

    def answers_logp(self, weights, prompts, responses, temperature):
        """The log-prob of each response token, [response], of each answer of a batch."""
        found = self.vocabulary_logp(weights, prompts, responses, temperature)
        return [token_logp(logps, ids) for logps, ids in zip(found, responses, strict=True)]

    def vocabulary_logp(self, weights, prompts, responses, temperature, nuclei=(), routes=None, rows=None):
        """The log-probs of all tokens, or the first `rows`, where the response tokens of a batch are drawn, [response,
        vocabulary] of each answer.

        These are over the `nuclei`, if given, of each token. `routes` is explained in `routed`.
        """
        logits = self.logits(weights, prompts, responses, temperature, routes)[:, :rows]
        logps = (cut(logits, nuclei) if nuclei else logits).log_softmax(-1)
        return logps.split([len(response) for response in responses])

    def logits(self, weights, prompts, responses, temperature, routes=None):
        """The logits from which the response tokens of a batch are drawn, [all tokens, vocabulary]."""
        own = {}
        for name, weight in module_weights(weights).items():
            own[name.removeprefix("model.").removeprefix("language_model.")] = weight
        head = own.pop("lm_head.weight", own["embed_tokens.weight"])

        # A row of ids for each answer: a position does not see the padding after it.
        rows = [torch.tensor(prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(head.device)
        inputs = {"input_ids": ids, "use_cache": False}
        with routed(self.module, routes, ids.shape):
            hidden = torch.func.functional_call(self.module.model, own, args=(), kwargs=inputs).last_hidden_state
        states = [hidden[n, len(prompt) - 1 : len(rows[n]) - 1] for n, prompt in enumerate(prompts)]
        return torch.cat(states) @ head.T / temperature


def token_logp(logps, ids):
    """The log-probs of tokens, [tokens], among those of the whole vocabulary, [tokens, vocabulary]."""
    return logps.gather(-1, torch.tensor(ids, device=logps.device)[:, None])[:, 0]


@contextlib.contextmanager
def routed(module, routes, shape):
    """Let routers send each token of a batch [rows, positions] where it went before: algo.replay_routes.

    `routes` has a list for each row, of the experts [positions, k] in each layer: an empty one is filled by this pass.
    """

    def replay(gate, _, output):
        logits, _, own = output
        chosen = []
        number = next(numbers)
        for row, experts in zip(routes, own.unflatten(0, shape), strict=True):
            if len(row) == number:
                row.append(experts)
            before = row[number][: shape[1]]  # which may have had more padding, or less
            chosen.append(torch.cat([before, experts[len(before) :]]))
        experts = torch.cat(chosen)
        scores = logits.float().softmax(-1).gather(-1, experts)
        if getattr(gate, "norm_topk_prob", True):
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores, experts

    numbers = itertools.count()
    gates = [part for name, part in module.named_modules() if name.endswith("mlp.gate")] if routes is not None else []
    hooks = [gate.register_forward_hook(replay) for gate in gates]
    yield
    for hook in hooks:
        hook.remove()


def round_output(half, module, inputs, output):
    """What a layer gives, as one that computes in half precision gives it."""
    is_number = isinstance(output, torch.Tensor) and output.is_floating_point()
    return output.to(half).float() if is_number else output


def module_weights(weights):
    """The parameters of the module: as in the files, but transformers 5 holds all experts of a layer in two tensors."""
    found = {}
    experts = {}  # layer → number → name of a part → weight
    for name, weight in weights.items():
        match = EXPERT.fullmatch(name)
        if match:
            layer, number, part = match.groups()
            experts.setdefault(layer, {}).setdefault(int(number), {})[MIXTRAL.get(part, part)] = weight
        else:
            found[name.replace("block_sparse_moe.gate.", "mlp.gate.")] = weight

    for layer, by_number in experts.items():
        parts = [part for _, part in sorted(by_number.items())]
        gate_up = [torch.cat([part["gate_proj"], part["up_proj"]]) for part in parts]
        found[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        found[f"{layer}.mlp.experts.down_proj"] = torch.stack([part["down_proj"] for part in parts])
    return found


# ---------------------------------------------------------------- what a folder has


def read_weights(folder, dtype, tied, device="cpu"):
    """The tensors of all safetensors files of a folder, in fp32 but with the values that a model of `dtype` has."""
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if not name.startswith(("model.visual.", "mtp.")):
                weights |= split_experts(name, rounded(weight.to(device, torch.float32), dtype))
    if tied:
        weights.pop("lm_head.weight", None)
    return weights


def split_experts(name, weight):
    """{name: weight} of a tensor of a file; of one with all experts of a layer, as Qwen3.5 has them, of each expert."""
    layer, _, part = name.rpartition(".experts.")
    found = {}
    if part == "down_proj":
        found = {f"{layer}.experts.{n}.down_proj.weight": down for n, down in enumerate(weight)}
    elif part == "gate_up_proj":
        for n, (gate, up) in enumerate(each.chunk(2) for each in weight):
            found |= {f"{layer}.experts.{n}.gate_proj.weight": gate, f"{layer}.experts.{n}.up_proj.weight": up}
    return found or {name: weight}


def rounded(weight, dtype):
    """The weight as a model of this dtype has it; the gradient passes as if it were not rounded."""
    if dtype == "fp32":
        return weight
    return weight + (weight.detach().to(HALF[dtype]).float() - weight.detach())


def end_tokens(folder, tokenizer):
    """The tokens that end an answer."""
    read = transformers.GenerationConfig if Path(folder, "generation_config.json").exists() else transformers.AutoConfig
    ends = read.from_pretrained(folder).eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}


# ---------------------------------------------------------------- LoRA


def initial_factors(weights, lora):
    """The factors A [rank, in] and B [out, rank] of each adapted weight before training; A is drawn by its name."""
    chosen = [part for target in lora.targets for part in TARGETS[target]]
    factors = {}
    for name, weight in weights.items():
        stem = name.removesuffix("weight")
        if not name.endswith(".weight") or stem.split(".")[-2] not in chosen:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{stem}lora_A.weight".encode()))
        bound = 1 / math.sqrt(weight.shape[1])
        drawn = torch.empty(lora.rank, weight.shape[1]).uniform_(-bound, bound, generator=generator)
        factors[f"{stem}lora_A.weight"] = drawn
        factors[f"{stem}lora_B.weight"] = torch.zeros(weight.shape[0], lora.rank)
    return factors


def merge_factors(frozen, factors, lora, dtype):
    """The weights that the model computes with: W + alpha / rank · B A."""
    merged = dict(frozen)
    for name, a in factors.items():
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix("lora_A.weight")
            product = factors[f"{stem}lora_B.weight"] @ a
            merged[f"{stem}weight"] = rounded(frozen[f"{stem}weight"] + lora.alpha / lora.rank * product, dtype)
    return merged
