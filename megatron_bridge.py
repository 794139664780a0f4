"""Between Hugging Face and Megatron-core: process groups, the model, its weights in and out, log-probs, the optimizer.

Knows nothing of rewards, groups, advantages or prompts. What it relies on of a micro-batch `mb` are the fields `tokens,
targets, mask, position_ids` (each [1, T]), `weights` ([1, T] or None; 0 where a token has no part in the loss),
`cu_seqlens` [S+1] and `max_seqlen`; S sequences lie one after another in a row of T tokens.

Weights cross the border as (Hugging Face name, full tensor) pairs: `load_weights` reads them, `hf_weights` yields them,
for vLLM and for the export alike. One table, `FAMILIES`, says of which Hugging Face weights a Megatron layer is made.
"""

import contextlib
import dataclasses
import datetime
import importlib.util
import json
import math
import os
import re
import shutil
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pydantic
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

from support import cpu_backend
from support import watchdog as guard

# What every run without Transformer Engine and Apex says, and nobody needs to act on.
for said in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    r"\s*The 'megatron.core.transformer.custom_layers",
    "`torch.distributed",
):
    warnings.filterwarnings("ignore", said)

if not torch.cuda.is_available():
    cpu_backend.install()  # before Megatron-core is imported

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.utils import unwrap_model
from safetensors import safe_open
from safetensors.torch import save_file

from support.checkpoint import put_in_place, sync
from support.optimizer_state import set_adam_steps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOGITS_CHUNK = 2048  # response tokens whose full-vocabulary logits exist at a time
EXPORT_SHARD_BYTES = 4 << 30


# ---------------------------------------------------------------- process groups


def init_distributed(timeout_s: float) -> None:
    """Join torchrun's world: gloo on the CPU, NCCL (and gloo for Python objects) on GPUs.

    A collective that takes longer than `timeout_s` fails.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=guard.fresh_store(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def init_model_parallel(parallel, seed: int, timeout_s: float = 1800.0) -> None:
    """Build Megatron's process groups for `parallel` (tp, pp, vpp, cp, ep, etp) and seed its random streams."""
    mpu.initialize_model_parallel(
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )
    model_parallel_cuda_manual_seed(seed)


def seed_step(seed: int, step: int) -> None:
    """Seed Megatron's and torch's random streams (dropout, where someone turns it on) for one step.

    So they are the same whether or not the run was interrupted before it.
    """
    model_parallel_cuda_manual_seed(seed * 1_000_003 + step, force_reset_rng=True)
    torch.manual_seed(seed * 1_000_003 + step)


def process_groups() -> dict[str, dist.ProcessGroup]:
    """Every process group of this rank that training talks over, by name."""
    return {
        "world": dist.group.WORLD,
        "parallel.tp": mpu.get_tensor_model_parallel_group(),
        "parallel.pp": mpu.get_pipeline_model_parallel_group(),
        "parallel.cp": mpu.get_context_parallel_group(),
        "parallel.ep": mpu.get_expert_model_parallel_group(),
        "parallel.etp": mpu.get_expert_tensor_parallel_group(),
        "data parallel": mpu.get_data_parallel_group(with_context_parallel=True),
        "data parallel of the experts": mpu.get_expert_data_parallel_group(),
    }


def device() -> torch.device:
    """Where tensors of this rank live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def data_parallel() -> tuple[int, int]:
    """(rank, size) of this rank among the model replicas."""
    return mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()


def reports_loss() -> bool:
    """True on one rank a replica: the last pipeline stage, first tensor- and context-parallel rank.

    A sum over these counts each token once.
    """
    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return first and mpu.is_pipeline_last_stage(ignore_virtual=True)


def token_multiple(parallel) -> int:
    """What the length of a packed row must be a multiple of: context parallelism, then tensor parallelism, split it."""
    return parallel.tp * parallel.cp


def micro_batch_multiple(parallel) -> int:
    """What a replica's number of micro-batches must be a multiple of: the interleaved schedule wants full rounds."""
    return parallel.pp if parallel.vpp > 1 else 1


# ---------------------------------------------------------------- context parallelism

# Rank r of cp holds the tokens r, r + cp, r + 2 cp, ... of every packed row, so each has the same share of early
# (cheap) and late (dear) positions of every sequence. Source: Striped Attention, arXiv 2311.09431; keys and values are
# gathered whole instead of passed around a ring.


def own_stripe(x: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of a row; [..., T] → [..., T / cp]."""
    return x[..., mpu.get_context_parallel_rank() :: mpu.get_context_parallel_world_size()]


def gather_stripes(x: torch.Tensor, summed_gradient: bool) -> torch.Tensor:
    """All ranks' tokens, in the order of the row; [T / cp, ...] → [T, ...].

    `summed_gradient`: every rank uses the result for a part of the loss of its own, so the gradients of all ranks add
    up. Without it every rank computes the same whole loss, and each takes the gradient of its own tokens.
    """
    cp = mpu.get_context_parallel_world_size()
    if cp == 1:
        return x
    gathered = gather_from_sequence_parallel_region(x, summed_gradient, mpu.get_context_parallel_group())
    return gathered.unflatten(0, (cp, -1)).transpose(0, 1).flatten(0, 1)  # rank by rank → [T, ...]


# ---------------------------------------------------------------- model


class RMSNorm(torch.nn.Module):
    """RMS norm whose weight is marked for sequence parallelism, which Megatron's own torch norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclasses.dataclass
class Packing(PackedSeqParams):
    """Where the S sequences of a packed row lie.

    Rides through Megatron's layers to the rotary embedding and core attention. This rank's queries are a stripe of the
    row under context parallelism, else all of it; its keys are always the whole row.
    """

    position_ids: torch.Tensor | None = None  # [T / cp], position of each query in its own sequence
    query_slot: torch.Tensor | None = None  # [T / cp], place of each query in a padded [S * max_seqlen_q] layout
    key_slot: torch.Tensor | None = None  # [T], place of each key in a padded [S * max_seqlen_kv] layout
    mask: torch.Tensor | None = None  # [S, 1, max_seqlen_q, max_seqlen_kv], True where a query sees a key; None: causal

    @classmethod
    def of(cls, mb) -> "Packing":
        starts_S, lengths_S = mb.cu_seqlens[:-1].long(), mb.cu_seqlens.diff()
        sequences, position_T = len(lengths_S), mb.position_ids[0]
        sequence_T = torch.arange(sequences, device=starts_S.device).repeat_interleave(
            lengths_S, output_size=len(position_T)
        )
        key_slot_T = sequence_T * mb.max_seqlen + position_T
        query_slot, max_queries, mask = key_slot_T, mb.max_seqlen, None
        cp = mpu.get_context_parallel_world_size()
        if cp > 1:
            first_S = (starts_S - mpu.get_context_parallel_rank() + cp - 1) // cp  # first query of each, in the stripe
            sequence, max_queries = own_stripe(sequence_T), -(-mb.max_seqlen // cp)
            place = torch.arange(len(sequence), device=sequence.device) - first_S[sequence]
            query_slot = sequence * max_queries + place  # [T / cp]
            position = position_T.new_zeros(sequences * max_queries).index_copy(0, query_slot, own_stripe(position_T))
            keys = torch.arange(mb.max_seqlen, device=position.device)
            mask = (position[:, None] >= keys).view(sequences, 1, max_queries, mb.max_seqlen)
        return cls(
            qkv_format="sbhd",  # keeps Megatron from its own per-sequence loop over "thd"
            cu_seqlens_q=mb.cu_seqlens, cu_seqlens_kv=mb.cu_seqlens,
            max_seqlen_q=max_queries, max_seqlen_kv=mb.max_seqlen,
            position_ids=own_stripe(position_T), query_slot=query_slot, key_slot=key_slot_T, mask=mask,
        )  # fmt: skip


class PackedRope(torch.nn.Module):
    """Rotary embedding of each packed token at its own position, with the frequencies transformers computes."""

    def __init__(self, hf_config):
        super().__init__()
        self.inv_freq = rotary_embedding(hf_config).inv_freq.to(device())  # [head_dim / 2], safe from dtype casts

    def get_rotary_seq_len(self, inference_context, decoder, hidden, config, packing: Packing) -> Packing:
        return packing  # what GPTModel hands on to forward()

    def forward(self, packing: Packing, **unused) -> torch.Tensor:
        angles = torch.outer(packing.position_ids.float(), self.inv_freq)  # [T / cp, head_dim / 2]
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]  # [T / cp, 1, 1, head_dim]


def rotary_embedding(hf_config) -> torch.nn.Module:
    """transformers' own rotary embedding, for its frequencies (Llama 3 scaling included).

    Raises ValueError for a type that scales attention or changes with the length.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(hf_config)
    if rope.rope_type not in ("default", "linear", "llama3") or rope.attention_scaling != 1.0:
        raise ValueError(f"rope type {rope.rope_type!r} is not supported; supported are default, linear, llama3")
    return rope


class PackedAttention(torch.nn.Module):
    """Causal attention inside each packed sequence: pad to [S, max_seqlen], one scaled_dot_product_attention, unpad.

    Padding stands right of every real token, so the causal mask alone keeps it out. No Transformer Engine, CPU and GPU
    alike. Under context parallelism the keys and values of the other ranks are gathered first.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **unused):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, packed_seq_params: Packing, **unused) -> torch.Tensor:
        """query [T / cp, 1, heads, d], key and value [T / cp, 1, kv_heads, d] → [T / cp, 1, heads * d]."""
        packing, sequences = packed_seq_params, len(packed_seq_params.cu_seqlens_q) - 1
        key, value = gather_stripes(torch.stack((key, value), dim=1), summed_gradient=True).unbind(1)  # [T, 1, ...]

        def pad(x, slot, width):  # [tokens, 1, n, d] → [S, n, width, d]
            padded = x.new_zeros(sequences * width, *x.shape[2:]).index_copy(0, slot, x.squeeze(1))
            return padded.view(sequences, width, *x.shape[2:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            pad(query, packing.query_slot, packing.max_seqlen_q),
            *(pad(x, packing.key_slot, packing.max_seqlen_kv) for x in (key, value)),
            attn_mask=packing.mask, is_causal=packing.mask is None, scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )  # fmt: skip
        out = out.transpose(1, 2).flatten(0, 1).flatten(1)  # [S * max_seqlen_q, heads * d]
        return out.index_select(0, packing.query_slot).unsqueeze(1)  # [T / cp, 1, heads * d]


class Router(TopKRouter):
    """Megatron's router with a balancing loss that does not depend on tp and cp, and a count of each expert's load.

    Megatron weighs the loss with the tokens of the rank; here it is those of the whole micro-batch. `padding_mask` is
    True where no response token is predicted, so loss and load speak of the tokens that are trained, and the weight
    matches the denominator of `token_mean`.
    """

    def __init__(self, config, **kwargs):
        super().__init__(config=config, **kwargs)
        self.load = torch.zeros(config.num_moe_experts, device=device())  # tokens of each expert, until `expert_load`

    def forward(self, input, padding_mask=None):
        probs, routing_map = super().forward(input, padding_mask)
        if self.training:  # full recompute counts everything twice: only ratios are read
            self.load = self.load + (routing_map & ~padding_mask.reshape(-1, 1)).sum(0)
        return probs, routing_map

    def _apply_aux_loss(self, probs, scores_for_aux_loss, routing_map, with_padding_mask=False):
        """Switch Transformer's loss, arXiv 2101.03961 eq. 4, over the micro-batch: coefficient · E · sum_e f_e P_e."""
        coefficient, experts = self.get_aux_loss_coeff("aux_loss"), self.config.num_moe_experts
        tokens_E = routing_map.sum(0).float()
        dist.all_reduce(tokens_E, group=self.tp_cp_group)
        tokens = tokens_E.sum() / self.topk
        share_E = scores_for_aux_loss.sum(0)  # this rank's part of tokens · P_e
        loss = coefficient * experts * (tokens_E * share_E).sum() / (tokens * self.topk).clamp(min=1)
        return MoEAuxLossAutoScaler.apply(probs, loss)


class HiddenGPT(GPTModel):
    """A GPTModel that ends with the last hidden state, so that logits are made only where a log-prob is wanted."""

    def _postprocess(self, hidden_states, *args, **kwargs) -> torch.Tensor:
        return hidden_states


# Fields of Megatron's configuration that the model's config.json settles.
FROM_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "layernorm_epsilon", "gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias",
    "qk_layernorm", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq",
)  # fmt: skip


def transformer_config(hf, parallel, dtype: torch.dtype, extra: dict) -> TransformerConfig:
    """The Megatron configuration of a Hugging Face `hf` config; `extra` overrides any field.

    Megatron raises on what it refuses.
    """
    rules = FAMILIES[hf.architectures[0]]
    settings = dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias="self_attention.linear_qkv.bias" in rules,
        qk_layernorm="self_attention.q_layernorm.weight" in rules,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sp and parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        # Packed rows differ in length. Interleaved stages get rows of one length: between two stages Megatron 0.16
        # swaps the lengths it sends in the two directions, and the rows themselves too unless sends overlap.
        variable_seq_lengths=parallel.pp > 1 and parallel.vpp == 1,
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, with or without experts
        moe_aux_loss_coeff=0.0,
        calculate_per_token_loss=True,  # gradients are sums, divided once by the global denominator
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,  # needs Apex or Transformer Engine
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    if is_moe(hf):
        settings |= dict(
            num_moe_experts=num_experts(hf),
            moe_ffn_hidden_size=expert_width(hf),
            moe_router_topk=hf.num_experts_per_tok,
            # Top-k of the softmax, or the softmax of the top-k: the same as renormalising what was chosen.
            moe_router_pre_softmax=not getattr(hf, "norm_topk_prob", True),
            moe_shared_expert_intermediate_size=getattr(hf, "shared_expert_intermediate_size", None),
            moe_shared_expert_gate="mlp.shared_experts.gate_weight" in rules,
        )
    return TransformerConfig(**{**settings, **options_for(TransformerConfig, extra)})


def head_dim(hf) -> int:
    """Width of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def is_moe(hf) -> bool:
    """Whether the layers hold experts instead of one feed-forward block."""
    return "mlp.router.weight" in FAMILIES[hf.architectures[0]]


def num_experts(hf) -> int:
    """Routed experts of a layer."""
    return getattr(hf, "num_local_experts", None) or hf.num_experts


def expert_width(hf) -> int:
    """Feed-forward size of one routed expert."""
    return getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size


CONFIG_CLASSES = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


def megatron_fields(*classes: type) -> set[str]:
    """Names of the fields of Megatron's config `classes` (all three if none is given)."""
    return {field.name for cls in classes or CONFIG_CLASSES for field in dataclasses.fields(cls)}


def options_for(cls: type, options: dict) -> dict:
    """Those of `options` that are fields of `cls`; a name that several classes share goes to each of them."""
    return {name: value for name, value in options.items() if name in megatron_fields(cls)}


def check_type(name: str, value: Any) -> None:
    """Raises ValueError where `value` is not of the type that Megatron declares for its field `name`."""
    for cls in CONFIG_CLASSES:
        if name in megatron_fields(cls):
            settings = {"arbitrary_types_allowed": True, "allow_inf_nan": False}
            try:
                pydantic.TypeAdapter(typing.get_type_hints(cls)[name], config=settings).validate_python(value)
            except pydantic.ValidationError as error:
                raise ValueError(f"megatron.{name}={value!r}: {error.errors()[0]['msg']}") from None


LONGEST = "data.max_prompt_tokens + the larger of rollout.max_new_tokens and eval.max_new_tokens"


def check_model(path: str, parallel, rollout_tp: int, max_tokens: int, dtype: str, extra: dict) -> None:
    """See, without weights or process groups, that the model of `path` can be built and split.

    `max_tokens`: the longest sample; `extra`: the megatron section of the configuration. Raises ValueError naming the
    key.
    """
    try:
        hf = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:  # a damaged config.json fails as code does, with any exception
        raise ValueError(f"model.path={path}: {' '.join(str(error).split())[:300]}") from None
    family = (hf.architectures or ["?"])[0]
    if family not in FAMILIES:
        raise ValueError(f"model.path={path} is a {family}; supported are {', '.join(FAMILIES)}")
    # What changes the computation and has no counterpart here, with the value that leaves it out.
    plain = {
        "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "qkv_bias": True, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "router_jitter_noise": 0.0, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    for attribute, value in plain.items():
        found = getattr(hf, attribute, None)
        if found not in (None, value):
            raise ValueError(
                f"model.path={path}: {attribute}={found!r} in its config.json is not supported, only {value}"
            )
    window = hf.sliding_window if getattr(hf, "use_sliding_window", hasattr(hf, "sliding_window")) else None
    if window and max_tokens > window:
        raise ValueError(
            f"model.path={path} attends to the last {window} tokens only (sliding_window), which is not supported for "
            f"samples longer than that: {LONGEST} = {max_tokens}"
        )
    try:
        rotary_embedding(hf)
    except ValueError as error:
        raise ValueError(f"model.path={path}: {error}") from None
    check_layout(hf, parallel, rollout_tp)
    if max_tokens > hf.max_position_embeddings:
        raise ValueError(
            f"{LONGEST} = {max_tokens} is beyond the model's {hf.max_position_embeddings} positions "
            f"(max_position_embeddings of model.path={path})"
        )
    if extra.get("moe_token_dispatcher_type") == "flex" and importlib.util.find_spec("deep_ep") is None:
        raise ValueError("megatron.moe_token_dispatcher_type=flex needs DeepEP (deep_ep), which is not installed")
    for name, value in extra.items():
        check_type(name, value)
    try:
        transformer_config(hf, parallel, DTYPES[dtype], extra)
    except (AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"megatron.{name}" for name in extra) or "empty"
        raise ValueError(f"Megatron-core refuses this layout or the megatron section ({given}): {error}") from None


def check_layout(hf, parallel, rollout_tp: int) -> None:
    """See that every parallel size divides what it splits. Raises ValueError naming the key and the legal values."""
    heads = {"attention heads": hf.num_attention_heads}
    shared = getattr(hf, "shared_expert_intermediate_size", None)
    ffn = {} if is_moe(hf) else {"feed-forward size": hf.intermediate_size}
    ffn |= {"shared expert's feed-forward size": shared} if shared else {}
    expert_ffn = {"expert feed-forward size": expert_width(hf)} if is_moe(hf) else {}
    stages = {"layers": hf.num_hidden_layers}
    vocabulary = {"key-value heads": hf.num_key_value_heads, "vocabulary size": hf.vocab_size}
    divides = [
        ("parallel.tp", parallel.tp, heads | ffn | vocabulary),
        ("rollout.tp", rollout_tp, heads | ffn),  # vLLM pads or repeats the others
        ("parallel.ep", parallel.ep, {"experts": num_experts(hf) if is_moe(hf) else 1}),
        ("parallel.etp", parallel.etp, expert_ffn or {"experts": 1}),
        ("parallel.pp", parallel.pp, stages),
        ("parallel.vpp", parallel.vpp, {"layers of a pipeline stage": hf.num_hidden_layers // parallel.pp}),
    ]
    for key, by, sizes in divides:
        for what, size in sizes.items():
            if size % by:
                legal = [n for n in range(1, min(sizes.values()) + 1) if not any(s % n for s in sizes.values())]
                raise ValueError(f"{key}={by} does not divide the model's {what} {size}; legal are {legal[:16]}")
    if parallel.vpp > 1 and parallel.pp == 1:
        raise ValueError(f"parallel.vpp={parallel.vpp} needs parallel.pp above 1: it interleaves pipeline stages")
    if is_moe(hf) and parallel.tp > 1 and not parallel.sp:
        raise ValueError("parallel.sp=false: experts with parallel.tp above 1 need sequence parallelism, use true")


def build_model(path: str, parallel, dtype: torch.dtype, extra: dict) -> list[DistributedDataParallel]:
    """This rank's model chunks (one, or `vpp`), built from the Hugging Face folder `path`, with its weights."""
    hf = transformers.AutoConfig.from_pretrained(path)
    config = transformer_config(hf, parallel, dtype, extra)
    chunks = []
    for stage in range(parallel.vpp):
        vp_stage = stage if parallel.vpp > 1 else None
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        attention = spec.submodules.self_attention.submodules
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if is_moe(hf):
            spec.submodules.mlp.submodules.router = Router
        layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        model = HiddenGPT(
            config,
            TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm),
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        model.rotary_pos_emb = PackedRope(hf)
        if model.post_process:  # token_logprobs gathers and reduces once for all its chunks
            head = model.output_layer
            head.sequence_parallel, head.allreduce_dgrad, head.disable_grad_reduce = False, False, True
        for name, parameter in model.named_parameters():
            if EXPERT.search(name):  # Megatron 0.16 forgets it at ep 1, and sums over too few ranks
                parameter.allreduce = False
        chunks.append(model.to(device(), dtype))
    settings = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    ddp_config = DistributedDataParallelConfig(**{**settings, **options_for(DistributedDataParallelConfig, extra)})
    model = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    for chunk in model:
        chunk.hf_config = hf
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:  # only the last micro-batch starts the reduction
        config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
    load_weights(model, path)
    for chunk in model:
        chunk.broadcast_params()
    return model


def build_optimizer(model: list, lr: float, weight_decay: float, betas: tuple, clip_grad: float, extra: dict):
    """Adam with fp32 main weights, its state sharded over the replicas (Megatron's distributed optimizer)."""
    dtype = model[0].config.params_dtype
    settings = dict(
        optimizer="adam", lr=lr, weight_decay=weight_decay, adam_beta1=betas[0], adam_beta2=betas[1],
        clip_grad=clip_grad, params_dtype=dtype, bf16=dtype is torch.bfloat16, use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**settings, **options_for(OptimizerConfig, extra)}), model)
    for part in optimizer.chained_optimizers:
        set_adam_steps(part, 0)  # torch makes the state at the first update; it must be there to be saved and loaded
    return optimizer


def set_learning_rate(optimizer, lr: float) -> None:
    """Learning rate of the next step, for every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_step(optimizer) -> float:
    """One update from the gradients that were summed; returns their norm, before clipping.

    Where the norm is no number nothing is changed. The same on every rank.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if math.isfinite(norm):
        optimizer.step()
    return norm


# ---------------------------------------------------------------- forward, backward, log-probs


def vocab_parallel_logp(logits_T: torch.Tensor, targets_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each row, over a vocabulary split across the tensor-parallel ranks.

    logits_T [T, V / tp] fp32, targets_T [T] ids in the full vocabulary → logp_T, entropy_T [T]; both differentiable.
    Every rank goes on with the same values, so the sums need an all-reduce forward and none backward.
    """
    vocab = logits_T.shape[-1]
    local_T = targets_T - mpu.get_tensor_model_parallel_rank() * vocab
    here_T = (local_T >= 0) & (local_T < vocab)
    max_T = logits_T.detach().amax(-1)
    dist.all_reduce(max_T, dist.ReduceOp.MAX, group=mpu.get_tensor_model_parallel_group())
    shifted = logits_T - max_T[:, None]  # [T, V / tp]
    exp = shifted.exp()
    target_T = shifted.gather(-1, local_T.clamp(0, vocab - 1)[:, None])[:, 0] * here_T
    sums = torch.stack([exp.sum(-1), (exp * shifted).sum(-1), target_T])  # [3, T]
    exp_sum_T, weighted_sum_T, target_T = reduce_from_tensor_model_parallel_region(sums)
    log_z_T = exp_sum_T.log()
    return target_T - log_z_T, log_z_T - weighted_sum_T / exp_sum_T


def token_logprobs(model, hidden, targets, mask, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of the target and entropy at each position, 0 where `mask` is 0.

    hidden [T / cp (/ tp under sequence parallelism), 1, h], targets and mask [1, T] → logp_T, entropy_T [T] fp32, on
    every context-parallel rank. Logits exist for masked-in rows only, LOGITS_CHUNK at a time, and are made anew in the
    backward pass: a full [T, V] would not fit.
    """
    model = unwrap_model(model)
    tied = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)  # [T / cp, 1, h]; the backward pass reduce-scatters
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)  # the backward pass all-reduces
    targets, mask = own_stripe(targets[0]), own_stripe(mask[0])  # [T / cp]
    rows_R = mask.nonzero()[:, 0]

    def chunk_logprobs(hidden_R, targets_R):
        logits, _ = model.output_layer(hidden_R, weight=tied)  # [R, V / tp]
        return torch.stack(vocab_parallel_logp(logits.float() / temperature, targets_R), dim=-1)  # [R, 2]

    hidden_R, targets_R = hidden[:, 0].index_select(0, rows_R), targets.index_select(0, rows_R)
    if len(rows_R) > LOGITS_CHUNK:
        checkpoint = partial(torch.utils.checkpoint.checkpoint, chunk_logprobs, use_reentrant=False)
        values_R = torch.cat(list(map(checkpoint, hidden_R.split(LOGITS_CHUNK), targets_R.split(LOGITS_CHUNK))))
    else:
        values_R = chunk_logprobs(hidden_R, targets_R)
    values = values_R.new_zeros(len(mask), 2).index_copy(0, rows_R, values_R)  # [T / cp, 2]
    logp_T, entropy_T = gather_stripes(values, summed_gradient=False).unbind(-1)
    return logp_T, entropy_T


def forward_step(micro_batches: Iterator, model, loss_func: Callable, temperature: float):
    """Megatron's forward_step: the next micro-batch through one model chunk.

    On the last stage, `loss_func(mb, logp_T, entropy_T)`.
    """
    mb, chunk = next(micro_batches), unwrap_model(model)
    untrained = own_stripe(mb.mask if mb.weights is None else mb.weights) == 0  # [1, T / cp], no matter to the routers
    if chunk.config.sequence_parallel and not chunk.pre_process:  # Megatron 0.16 splits it on the first stage only
        untrained = untrained.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)
        untrained = untrained[mpu.get_tensor_model_parallel_rank()].contiguous()
    tokens, positions = own_stripe(mb.tokens).contiguous(), own_stripe(mb.position_ids)  # [1, T / cp]
    options = {"padding_mask": untrained} if chunk.config.num_moe_experts else {}
    output = model(tokens, positions, attention_mask=None, packed_seq_params=Packing.of(mb), **options)
    if not chunk.post_process:
        return output, None
    logp_T, entropy_T = token_logprobs(model, output, mb.targets, mb.mask, temperature)

    def loss(logp_T):
        loss_sum, denominator, report = loss_func(mb, logp_T, entropy_T)
        # Every context-parallel rank has the whole row, and Megatron adds their denominators.
        return loss_sum, denominator * (mpu.get_context_parallel_rank() == 0), report

    return logp_T, loss


def forward_backward(
    model: list, micro_batches: list, loss_func: Callable, temperature: float, forward_only=False
) -> list:
    """Run Megatron's pipeline schedule over `micro_batches`.

    `loss_func(mb, logp_T, entropy_T)` → (loss_sum, integer denominator, report). Returns the reports, on the last stage
    only. Gradients are summed over micro-batches and replicas and divided once by the global sum of the denominators
    (calculate_per_token_loss), so neither the split into micro-batches nor the layout enters the result.
    """
    for chunk in model:
        chunk.train(not forward_only)
        if not forward_only:
            chunk.zero_grad_buffer()
    schedule = get_forward_backward_func()
    with torch.set_grad_enabled(not forward_only):
        return schedule(
            forward_step_func=partial(forward_step, loss_func=loss_func, temperature=temperature),
            data_iterator=[iter(micro_batches) for _ in model] if len(model) > 1 else iter(micro_batches),
            model=model,
            num_microbatches=len(micro_batches),
            seq_length=max(mb.tokens.shape[1] for mb in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )


# ---------------------------------------------------------------- weights in and out

# The weights of one layer: Megatron name → (how it is joined, the Hugging Face weights of the layer it is made of).
#   copy     one tensor, the same on every tensor-parallel rank
#   rows     one tensor, split by output rows        cols  one tensor, split by input columns
#   qkv      query, key, value interleaved by key-value group, split by groups
#   gate_up  gate above up, each split by rows
# "{e}" stands for the number of an expert.
COMMON = {
    "input_layernorm.weight": ("copy", ["input_layernorm.weight"]),
    "self_attention.linear_qkv.weight": ("qkv", [f"self_attn.{x}_proj.weight" for x in "qkv"]),
    "self_attention.linear_proj.weight": ("cols", ["self_attn.o_proj.weight"]),
    "pre_mlp_layernorm.weight": ("copy", ["post_attention_layernorm.weight"]),
}
QKV_BIAS = {"self_attention.linear_qkv.bias": ("qkv", [f"self_attn.{x}_proj.bias" for x in "qkv"])}
QK_NORM = {f"self_attention.{x}_layernorm.weight": ("copy", [f"self_attn.{x}_norm.weight"]) for x in "qk"}
DENSE = {
    "mlp.linear_fc1.weight": ("gate_up", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
    "mlp.linear_fc2.weight": ("cols", ["mlp.down_proj.weight"]),
}
SHARED_EXPERT = {
    "mlp.shared_experts.linear_fc1.weight": ("gate_up", [f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up")]),
    "mlp.shared_experts.linear_fc2.weight": ("cols", ["mlp.shared_expert.down_proj.weight"]),
    "mlp.shared_experts.gate_weight": ("copy", ["mlp.shared_expert_gate.weight"]),
}


def experts(block: str, gate: str, up: str, down: str) -> dict:
    """Rules of a router and its experts, which lie in `block` under the names `gate`, `up` and `down`."""
    fc1, fc2 = (f"mlp.experts.local_experts.{{e}}.linear_{fc}.weight" for fc in ("fc1", "fc2"))
    return {
        "mlp.router.weight": ("copy", [f"{block}.gate.weight"]),
        fc1: ("gate_up", [f"{block}.experts.{{e}}.{part}.weight" for part in (gate, up)]),
        fc2: ("cols", [f"{block}.experts.{{e}}.{down}.weight"]),
    }


QWEN_EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")
# Architecture in config.json → its layer. What it is made of also settles Megatron's options (transformer_config).
FAMILIES = {
    "LlamaForCausalLM": COMMON | DENSE,
    "MistralForCausalLM": COMMON | DENSE,
    "MixtralForCausalLM": COMMON | experts("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen2ForCausalLM": COMMON | QKV_BIAS | DENSE,
    "Qwen2MoeForCausalLM": COMMON | QKV_BIAS | QWEN_EXPERTS | SHARED_EXPERT,
    "Qwen3ForCausalLM": COMMON | QK_NORM | DENSE,
    "Qwen3MoeForCausalLM": COMMON | QK_NORM | QWEN_EXPERTS,
}
TOP_RULES = {
    "embedding.word_embeddings.weight": ("rows", ["model.embed_tokens.weight"]),
    "decoder.final_layernorm.weight": ("copy", ["model.norm.weight"]),
    "output_layer.weight": ("rows", ["lm_head.weight"]),
}
SPLIT_DIM = {"copy": None, "rows": 0, "cols": 1, "qkv": 0, "gate_up": 1}  # of the joined view
EXPERT = re.compile(r"(?<=local_experts\.)\d+")  # an expert's number in a Megatron name


def rule_of(name: str, hf) -> tuple[str, list[str]]:
    """(join, Hugging Face names) of a Megatron weight with the numbers of layer and expert in the whole model.

    Raises KeyError for a name without a rule.
    """
    if name == "output_layer.weight" and hf.tie_word_embeddings:  # the last stage's copy of the embedding
        return TOP_RULES["embedding.word_embeddings.weight"]
    if name in TOP_RULES:
        return TOP_RULES[name]
    _, _, layer, rest = name.split(".", 3)  # decoder.layers.7.rest
    expert = EXPERT.search(rest)
    join, parts = FAMILIES[hf.architectures[0]][EXPERT.sub("{e}", rest)]
    return join, [f"model.layers.{layer}.{part.replace('{e}', expert[0]) if expert else part}" for part in parts]


def shard_group(name: str) -> tuple:
    """(process group over which a weight is spread, the ranks that split one tensor of it).

    That of an expert spans ep × etp ranks, of which each run of etp splits one expert; that of any other weight tp.
    """
    if EXPERT.search(name):
        return mpu.get_expert_tensor_and_model_parallel_group(), mpu.get_expert_tensor_parallel_world_size()
    return mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()


def expert_of(name: str, hf, ep_rank: int) -> str:
    """The name with the expert's number in the whole layer instead of that on expert-parallel rank `ep_rank`."""
    here = num_experts(hf) // mpu.get_expert_model_parallel_world_size() if EXPERT.search(name) else 0
    return EXPERT.sub(lambda local: str(ep_rank * here + int(local[0])), name)


def joined(join: str, parts: list[torch.Tensor], hf) -> torch.Tensor:
    """The joined view of the Hugging Face `parts`: whole, with the tensor-parallel split along SPLIT_DIM[join]."""
    if join == "qkv":  # [groups, (heads per group + 2) * head_dim, ...]
        return torch.cat([part.view(hf.num_key_value_heads, -1, *part.shape[1:]) for part in parts], dim=1)
    return torch.stack(parts) if join == "gate_up" else parts[0]  # gate_up: [2, ffn, hidden]


def parted(join: str, whole: torch.Tensor, hf) -> list[torch.Tensor]:
    """Inverse of `joined`: the Hugging Face tensors of a joined view."""
    if join == "qkv":
        width = head_dim(hf)
        heads = hf.num_attention_heads // hf.num_key_value_heads
        return [part.flatten(0, 1) for part in whole.split([heads * width, width, width], dim=1)]
    return list(whole) if join == "gate_up" else [whole]


def local_view(join: str, flat: torch.Tensor, shape: torch.Size, hf) -> torch.Tensor:
    """A rank's own weight, `flat` of a parameter with `shape`, in the layout of the joined view."""
    if join == "qkv":
        heads = hf.num_attention_heads // hf.num_key_value_heads
        return flat.view(-1, (heads + 2) * head_dim(hf), *shape[1:])
    return flat.view(2, shape[0] // 2, shape[1]) if join == "gate_up" else flat.view(shape)


def named_weights(model: list) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by Megatron name, with the layer's number in the whole model (an expert's is local)."""
    weights = {}
    for chunk in map(unwrap_model, model):
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, layer, rest = name.split(".", 3)
                name = f"decoder.layers.{chunk.decoder.layers[int(layer)].layer_number - 1}.{rest}"
            weights[name] = parameter
    return weights


def load_weights(model: list, path: str) -> None:
    """Fill this rank's shard from the safetensors of `path`, one tensor at a time.

    `check_weights` has compared the names; raises ValueError for a shape that does not fit.
    """
    hf = model[0].hf_config
    files = safetensor_files(path)
    handles = {file: safe_open(file, framework="pt") for file in set(files.values())}
    for name, parameter in named_weights(model).items():
        join, parts = rule_of(expert_of(name, hf, mpu.get_expert_model_parallel_rank()), hf)
        group, size = shard_group(name)
        whole = joined(join, [handles[files[part]].get_tensor(part) for part in parts], hf)
        shard = whole if SPLIT_DIM[join] is None else whole.chunk(size, SPLIT_DIM[join])[group.rank() % size]
        if shard.numel() != parameter.numel():
            raise ValueError(
                f"{parts[0]} of {path} gives {tuple(shard.shape)}, but {name} has {tuple(parameter.shape)}"
            )
        parameter.data.copy_(shard.reshape(parameter.shape))


def check_weights(path: str) -> None:
    """See that the safetensors of the folder `path` hold just the tensors the model is made of. Raises ValueError."""
    hf = transformers.AutoConfig.from_pretrained(path)
    layer = [
        rest.format(e=e)
        for rest in FAMILIES[hf.architectures[0]]
        for e in range(num_experts(hf) if "{e}" in rest else 1)
    ]
    rules = [f"decoder.layers.{i}.{rest}" for i in range(hf.num_hidden_layers) for rest in layer]
    wanted = {part for name in [*rules, *TOP_RULES] for part in rule_of(name, hf)[1]}
    try:
        found = {name for name in safetensor_files(path) if not name.endswith("rotary_emb.inv_freq")}
    except FileNotFoundError as error:
        raise ValueError(f"model.path={path}: {error}") from None
    if hf.tie_word_embeddings:
        found.discard("lm_head.weight")  # a copy that some exporters write
    for what, names in (("lacks", wanted - found), ("has tensors this model has no place for:", found - wanted)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"model.path={path} {what} {min(names)}{more}")


def local_folder(path: str) -> str:
    """The folder of a model: `path` itself, or the download of a hub name (the hub's client locks between ranks)."""
    if Path(path).is_dir():
        return path
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    return huggingface_hub.snapshot_download(path, allow_patterns=wanted)


def count_weights(path: str) -> int:
    """Numbers in the safetensors of a folder."""
    total = 0
    for file in set(safetensor_files(path).values()):
        with safe_open(file, framework="pt") as handle:
            total += sum(math.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118
    return total


def safetensor_files(path: str) -> dict[str, str]:
    """Tensor name → file, for the safetensors of a folder. Raises FileNotFoundError where there are none."""
    index = Path(path, "model.safetensors.index.json")
    if index.exists():
        return {name: str(Path(path, file)) for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = Path(path, "model.safetensors")
    if not single.exists():
        raise FileNotFoundError(f"{path} holds no model.safetensors")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), str(single))


def hf_weights(model: list, bucket_bytes: int = 512 << 20) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every (Hugging Face name, full tensor) in layer order, on every rank; all ranks must drain it together.

    Buckets of at most `bucket_bytes` (or one tensor) cross the wire: one all-gather over the ranks that share a weight
    and one broadcast over the pipeline stages, so a rank never holds more than a bucket besides its own shard.
    """
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:  # otherwise gathered only when the next forward pass reads them
            chunk.start_param_sync(force_sync=True)
    hf, own, dtype = model[0].hf_config, named_weights(model), model[0].config.params_dtype
    pp_group, pp_rank = mpu.get_pipeline_model_parallel_group(), mpu.get_pipeline_model_parallel_rank()
    stages = [None] * mpu.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, {name: weight.shape for name, weight in own.items()}, group=pp_group)
    for stage, names in buckets(stages, hf, bucket_bytes // dtype.itemsize):
        group, size = shard_group(names[0])
        numels = [stages[stage][name].numel() for name in names]
        flat = torch.empty(group.size(), sum(numels), dtype=dtype, device=device())
        if stage == pp_rank:
            local = torch.cat([own[name].detach().reshape(-1) for name in names])
            dist.all_gather(list(flat), local, group=group) if len(flat) > 1 else flat[0].copy_(local)
        if len(stages) > 1:
            dist.broadcast(flat, dist.get_global_rank(pp_group, stage), group=pp_group)
        for name, shards in zip(names, flat.split(numels, dim=1), strict=True):  # shards [group, numel]
            for ep_rank, split in enumerate(shards.split(size)):  # one round, but for experts
                join, parts = rule_of(expert_of(name, hf, ep_rank), hf)
                views = [local_view(join, shard, stages[stage][name], hf) for shard in split]
                whole = views[0] if SPLIT_DIM[join] is None else torch.cat(views, dim=SPLIT_DIM[join])
                yield from zip(parts, (part.contiguous() for part in parted(join, whole, hf)), strict=True)


def buckets(stages: list[dict], hf, limit: int) -> Iterator[tuple[int, list[str]]]:
    """Group the weights of all stages, in layer order, into (stage, names) of at most `limit` gathered numbers.

    A bucket holds one tensor at least, and either experts or other weights.
    """

    def position(name: str) -> tuple:
        if name.startswith("decoder.layers."):
            return int(name.split(".")[2]), bool(EXPERT.search(name))
        return (-1 if name.startswith("embedding.") else hf.num_hidden_layers), False

    owners = {name: stage for stage, weights in enumerate(stages) for name in weights}
    if hf.tie_word_embeddings:
        owners.pop("output_layer.weight", None)
    bucket, held, last = [], 0, None
    for name in sorted(owners, key=position):
        here, size = (owners[name], position(name)[1]), stages[owners[name]][name].numel() * shard_group(name)[0].size()
        if bucket and (here != last or held + size > limit):
            yield last[0], bucket
            bucket, held = [], 0
        bucket, held, last = [*bucket, name], held + size, here
    yield last[0], bucket


def expert_load(model: list) -> list[float]:
    """Per layer, the busiest expert's tokens over the mean of all experts, since the last call; [] without experts.

    Counted over the response tokens of the training passes. The same on every rank.
    """
    hf = model[0].hf_config
    if not is_moe(hf):
        return []
    load = torch.zeros(hf.num_hidden_layers, num_experts(hf), device=device())  # [layers, E]
    for chunk in map(unwrap_model, model):
        for layer in chunk.decoder.layers:
            load[layer.layer_number - 1] += layer.mlp.router.load
            layer.mlp.router.load = torch.zeros_like(layer.mlp.router.load)
    dist.all_reduce(load)  # tp and cp split the tokens, dp the samples, pp the layers
    return (load.amax(1) / load.mean(1)).tolist()


def export_hf(model: list, source: str, target: Path) -> None:
    """Write the model to the folder `target` so that transformers and vLLM load it.

    Config and tokenizer come from `source`. Called on every rank, written by rank 0, to a temporary name first:
    `target` is complete or absent.
    """
    writes = dist.get_rank() == 0
    temporary = target.with_name(target.name + ".tmp")
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for file in Path(source).iterdir():
            if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
                shutil.copy(file, temporary)
    shard, held, weight_map, shards = {}, 0, {}, 0

    def flush():
        save_file(shard, temporary / f"model-{shards:05d}.safetensors", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, f"model-{shards:05d}.safetensors"))

    for name, tensor in hf_weights(model):
        if writes:
            if held + tensor.nbytes > EXPORT_SHARD_BYTES and shard:
                flush()
                shard, held, shards = {}, 0, shards + 1
            shard[name], held = tensor.cpu(), held + tensor.nbytes
    if writes:
        flush()
        index = {"metadata": {}, "weight_map": weight_map}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        for file in temporary.iterdir():
            sync(file)
        put_in_place(temporary, target)
    dist.barrier()


def copy_weights(model: list) -> list[torch.Tensor]:
    """A second set of this rank's weights, such as a reference model's."""
    return [parameter.detach().clone() for chunk in model for parameter in chunk.parameters()]


@contextlib.contextmanager
def swapped_weights(model: list, weights: list[torch.Tensor]) -> Iterable[None]:
    """Run the model with `weights` (as `copy_weights` gave them); its own are back afterwards, untouched."""
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, data in zip(parameters, weights, strict=True):
            parameter.data = data
        yield
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data
