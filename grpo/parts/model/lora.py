"""LoRA (arXiv 2106.09685): a frozen weight W [out, in] with two thin factors, B [out, rank] and A [rank, in].

The model computes with the merged weight W + alpha / rank · B A, summed in fp32 and rounded once to the model's dtype.
A push sends the same merged weights to vLLM, so both sides use one model, as without adapters. W has no gradient, and
the backward pass recomputes the merged weight, so besides W a layer stores only its factors.

A Megatron weight that joins several Hugging Face weights (q, k, v; gate, up) has an A for each, as in PEFT, [parts,
rank, in], and one B, [out, rank], whose rows are in the order of the weight's own. Tensor parallelism splits B by the
rows of qkv and fc1, and A by the columns of proj and fc2. The other factor is replicated, its gradient all-reduced.
"""

import json
import math
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file

from grpo.parts.base.files import complete_folder
from grpo.parts.base.hf_folder import read_tensor
from grpo.parts.base.require import require
from grpo.parts.model import layers  # noqa: F401, first: it prepares the process for Megatron-core

# isort: split
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _reduce_scatter_along_first_dim
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

COLUMN = ("qkv", "fc1")  # targets whose rows tensor parallelism splits; it splits the columns of proj and fc2


@dataclass(frozen=True)
class Adapter:
    """The factors of a rank's shard [out, in] of a weight, in `weight.adapter`."""

    a: torch.nn.Parameter  # [parts, rank, in], of proj and fc2 [rank, in]
    b: torch.nn.Parameter  # [out, rank]
    scale: float  # alpha / rank
    has_row: torch.Tensor  # [out, parts] bool: whether a row of the shard belongs to the part
    split_rows: bool  # whether the group splits the rows of W, so that A is replicated; else B is
    group: dist.ProcessGroup  # tensor parallelism, for an expert its own group


# ---------------------------------------------------------------- the model


def attach(model, cfg):
    """Freeze a model chunk and add factors of zeros to its targeted weights.

    If `cfg` is None, only freeze it. If its rank is 0, do nothing.
    """
    if cfg and cfg.rank == 0:
        return
    model.requires_grad_(False)
    if cfg is None:
        return

    for name, linear in model.named_modules():
        target = name.rpartition(".linear_")[2]
        if target in cfg.targets:
            adapt(linear, target, cfg)
    if model.pre_process:  # a recomputed layer whose input needs no gradient gives its weights none
        model.embedding.register_forward_hook(lambda module, args, hidden: hidden.requires_grad_())


def adapt(linear, target, cfg):
    """Add factors to one of Megatron's parallel linear layers, which then computes with the merged weight."""
    weight = linear.weight
    out, width = weight.shape
    tp_rank = linear.tp_group.rank()
    rows = part_rows(linear, target)

    # The whole weight repeats blocks of all parts, and this shard may begin within a block.
    block = np.repeat(np.eye(len(rows), dtype=bool), rows, axis=0)  # [rows of a block, parts]
    number = (np.arange(out) + tp_rank * out) % len(block)
    has_row = torch.tensor(block[number], device=weight.device)

    split_rows = target in COLUMN
    shape = (len(rows), cfg.rank, width) if split_rows else (cfg.rank, width)
    linear.lora_a = torch.nn.Parameter(weight.new_zeros(shape))
    linear.lora_b = torch.nn.Parameter(weight.new_zeros(out, cfg.rank))
    for factor, replicated in ((linear.lora_a, split_rows), (linear.lora_b, not split_rows)):
        factor.tensor_model_parallel = True  # every rank adds it to the gradient norm,
        factor.shared = replicated and tp_rank > 0  # except replicas

    scale = cfg.alpha / cfg.rank
    weight.adapter = Adapter(linear.lora_a, linear.lora_b, scale, has_row, split_rows, linear.tp_group)
    linear._forward_impl = adapted_linear
    linear.sharded_state_dict = partial(sharded_state_dict, linear, target)


def part_rows(linear, target) -> list[int]:
    """Rows of each part in one block of a linear layer's weight."""
    out = len(linear.weight)
    if hasattr(linear, "parts"):  # of linear attention
        return linear.parts
    if target == "fc1":
        return [out // 2, out // 2]
    if target == "qkv":
        config = linear.config
        queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
        if config.attention_output_gate:
            queries *= 2
        return [queries, config.kv_channels, config.kv_channels]
    return [out]


def sharded_state_dict(linear, target, prefix="", sharded_offsets=(), metadata=None):
    """Megatron's sharded state of a layer, in which the split factor is split as its weight is."""
    state = type(linear).sharded_state_dict(linear, prefix, sharded_offsets, metadata)
    name, axis = ("lora_b", 0) if target in COLUMN else ("lora_a", 1)
    factor = make_tp_sharded_tensor_for_checkpoint(
        getattr(linear, name),
        prefix + name,
        axis,
        prepend_offsets=sharded_offsets,
        tp_group=linear.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
    if target == "fc1":
        factor = apply_swiglu_sharded_factory(factor, sharded_offsets)
    state[prefix + name] = factor
    return state


# ---------------------------------------------------------------- forward and backward


def adapted_linear(input, weight, bias, *, allreduce_dgrad, sequence_parallel, tp_group, product=None, **unused):
    """Replaces Megatron's linear functions and has their arguments; [T, 1, in] → [T, 1, out].

    `product(x, weight, bias)` takes the place of torch's product with the merged weight.
    """
    a, b = stack_factors([weight])
    if allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)  # the backward pass all-reduces
    if product:
        product = partial(product, bias=bias)  # adapters leave the bias as it is
    output = AdaptedLinear.apply(input, None, a[0], b[0], weight.adapter, sequence_parallel, product, weight)
    return output if bias is None or product else output + bias


def grouped_linear(x_D, ends_E, *weights):
    """The linear layer of E experts: x_D [D, in] sorted by expert, the end of each one's rows [E] int32 → [D, out]."""
    a, b = stack_factors(weights)
    return AdaptedLinear.apply(x_D, ends_E, a, b, weights[0].adapter, False, None, *weights)


class AdaptedLinear(torch.autograd.Function):
    """x (W + scale · B A)ᵀ of one weight, or of E experts with the ends of their rows.

    Saves x as it comes in, under sequence parallelism a shard of the rows. The gradients of A and B are thin products,
    without a gradient [out, in].
    """

    @staticmethod
    def forward(ctx, x, ends_E, a, b, adapter, sequence_parallel, product, *weights):
        ctx.adapter = adapter
        ctx.sequence_parallel = sequence_parallel
        ctx.save_for_backward(x, ends_E, a, b, *weights)
        if ends_E is not None and len(x) == 0:  # no token for these experts: on a GPU grouped_mm may refuse it
            return x.new_empty(0, weights[0].shape[0])
        rows = _gather_along_first_dim(x, adapter.group) if sequence_parallel else x
        merged = merge_all(weights, a, b, adapter.scale)
        return product(rows, merged) if product else matmul(rows, merged.mT, ends_E)

    @staticmethod
    def backward(ctx, grad):
        x, ends_E, a, b, *weights = ctx.saved_tensors
        adapter = ctx.adapter
        shape = (*grad.shape[:-1], x.shape[-1])
        grad = grad.contiguous().flatten(0, -2)

        if grad.numel() == 0:  # no token for these experts: grouped_mm refuses
            grad_x = torch.zeros_like(x)
            grad_a = torch.zeros_like(a)
            grad_b = torch.zeros_like(b)
        else:
            rows = _gather_along_first_dim(x, adapter.group) if ctx.sequence_parallel else x
            rows = rows.flatten(0, -2)
            grad_x = matmul(grad, merge_all(weights, a, b, adapter.scale), ends_E).view(shape)
            if ctx.sequence_parallel:
                grad_x = _reduce_scatter_along_first_dim(grad_x, adapter.group)
            grad_a = matmul((matmul(grad, b, ends_E) * adapter.scale).mT, rows, ends_E)
            grad_b = matmul(grad.mT, matmul(rows, a.mT, ends_E) * adapter.scale, ends_E)

        if adapter.group.size() > 1:  # partial sums, from this rank's rows or columns
            dist.all_reduce(grad_a if adapter.split_rows else grad_b, group=adapter.group)
        return grad_x, None, grad_a, grad_b, None, None, None, *[None] * len(weights)


def stack_factors(weights):
    """A [E, parts · rank, in] and B [E, out, parts · rank] of E weights; B has zeros in the columns of other parts."""
    adapters = [weight.adapter for weight in weights]
    a = torch.stack([adapter.a.flatten(0, -2) for adapter in adapters])
    b = torch.stack([adapter.b for adapter in adapters])
    return a, (b[:, :, None] * adapters[0].has_row[..., None]).flatten(2)


@torch.no_grad()
def merged_weight(weight: torch.nn.Parameter):
    """The merged weight, bit-equal to the one that the model computes with."""
    a, b = stack_factors([weight])
    return merge(weight, a[0], b[0], weight.adapter.scale)


def merge(weight, a, b, scale):
    """weight + scale · b a, summed in fp32, rounded once; [out, in], [k, in], [out, k] → [out, in]."""
    negative = b.float() @ (a.float() * -scale)
    return torch.sub(weight, negative, out=negative).to(weight.dtype)  # -0.0 - 0 is -0.0, but -0.0 + 0 is 0


def merge_all(weights, a, b, scale):
    """`merge` of one weight, or of E weights as one tensor [E, out, in], each as if it were alone."""
    if a.dim() == 2:
        return merge(weights[0], a, b, scale)
    whole = weights[0].new_empty(len(weights), *weights[0].shape)
    for e, weight in enumerate(weights):
        whole[e] = merge(weight, a[e], b[e], scale)
    return whole


def matmul(x, y, ends_E):
    """x @ y, or with `ends_E` one product for the rows of each expert."""
    return x @ y if ends_E is None else F.grouped_mm(x, y, offs=ends_E)


# ---------------------------------------------------------------- names, the start, a resume, the export


FACTORS = (".lora_a", ".lora_b")  # how the Megatron names of factors end


def weight_of(name):
    """The weight, in Megatron or in Hugging Face's model, to which a factor belongs."""
    return name.removesuffix(".weight").rpartition(".lora_")[0] + ".weight"


def factor_rule(name, join, parts: list[str]) -> tuple[str, list[str]]:
    """The rule of a factor, from the rule of its weight (rule_of in megatron_bridge.py); the names are PEFT's."""
    letter = name[-1].upper()
    names = [f"{part.removesuffix('weight')}lora_{letter}.weight" for part in parts]
    if join == "cols":
        return "cols" if letter == "A" else "copy", names
    return "stack" if letter == "A" else join, names


def read_part(name, opened: dict, shape):
    """A Hugging Face tensor from its file in `opened`, or a factor [this rank's `shape`] as it is before training."""
    if name in opened:
        return read_tensor(opened[name], name)
    weight = weight_of(name)
    out, width = read_tensor(opened[weight], weight).shape  # only mapped, not read
    whole = (out, shape[-1]) if name.endswith("lora_B.weight") else (shape[-2], width)
    return initial_factor(name, whole)


def initial_factor(name, shape):
    """A factor before training, as in PEFT: B is 0, A [rank, in] is uniform within ±1 / sqrt(in).

    It depends on the name alone.
    """
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def check_resumed(was, cfg, path):
    """Raise UserError unless the checkpoint in `path`, of a run with the `lora` section `was`, has cfg's adapters."""
    now = {**cfg.model_dump(), "targets": sorted(cfg.targets)}
    was = {**was, "targets": sorted(was["targets"])}
    require(
        now == was,
        f"lora={now}, but {path} was saved with lora={was}: other adapters are another model. Use its section, "
        "or start a new run (resume=none) with model.path=its export in hf/",
    )


def export_adapter(weights, base, cfg, step):
    """Write the factors, (Hugging Face name, full tensor) pairs, to output_dir/adapter/step_N, for PEFT on the `base`.

    Factors of experts are not written: transformers 5 has all experts of a layer as one parameter. Called on every
    rank, written by rank 0. The folder is complete or absent.
    """
    is_writer = dist.get_rank() == 0
    target = Path(cfg.output_dir, f"adapter/step_{step:06d}")
    factors = {}
    for name, factor in weights:  # on every rank, as each pair is gathered from all
        if is_writer:
            factors[f"base_model.model.{name}"] = factor.cpu()

    if any(".experts." in name for name in factors):
        print(f"warning: {target} is not written: there is no export of experts' adapters; hf/ has the merged model")
    elif is_writer:
        settings = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": cfg.lora.rank,
            "lora_alpha": cfg.lora.alpha, "target_modules": sorted({name.split(".")[-3] for name in factors}),
            "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        }  # fmt: skip
        with complete_folder(target) as folder:
            (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
            save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    dist.barrier()
