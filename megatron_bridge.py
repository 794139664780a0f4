"""Between Hugging Face and Megatron-core: process groups, the model, its weights in and out, log-probs, the optimizer.

Knows nothing of rewards, groups, advantages or prompts. What it relies on of a micro-batch `mb` are the fields `tokens,
targets, mask, position_ids` (each [1, T]), `cu_seqlens` [S+1] and `max_seqlen`; S sequences lie one after another in a
row of T tokens.

Weights cross the border as (Hugging Face name, full tensor) pairs: `load_weights` reads them, `hf_weights` yields them,
for vLLM and for the export alike. One table, `LAYER_RULES`, says how a Megatron weight is made of Hugging Face weights.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

import cpu_backend

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
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.utils import unwrap_model
from safetensors import safe_open
from safetensors.torch import save_file

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOGITS_CHUNK = 2048  # response tokens whose full-vocabulary logits exist at a time
EXPORT_SHARD_BYTES = 4 << 30


# ---------------------------------------------------------------- process groups


def init_distributed() -> None:
    """Join torchrun's world: gloo on the CPU, NCCL (and gloo for Python objects) on GPUs."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def init_model_parallel(parallel, seed: int) -> None:
    """Build Megatron's process groups for `parallel` (tp, pp, vpp) and seed its random streams."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
    )
    model_parallel_cuda_manual_seed(seed)


def device() -> torch.device:
    """Where tensors of this rank live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def data_parallel() -> tuple[int, int]:
    """(rank, size) of this rank among the model replicas."""
    return mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()


def reports_loss() -> bool:
    """True on one rank a replica: the last pipeline stage, first tensor-parallel rank.

    A sum over these counts each token once.
    """
    return mpu.is_pipeline_last_stage(ignore_virtual=True) and mpu.get_tensor_model_parallel_rank() == 0


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

    Rides through Megatron's layers to the rotary embedding and core attention.
    """

    position_ids: torch.Tensor | None = None  # [T], position of each token in its own sequence
    padded_index: torch.Tensor | None = None  # [T], slot of each token in a padded [S * max_seqlen] layout

    @classmethod
    def of(cls, mb) -> "Packing":
        lengths_S = mb.cu_seqlens.diff()
        first_slot_S = torch.arange(len(lengths_S), device=lengths_S.device) * mb.max_seqlen
        position_T = mb.position_ids[0]
        slot_T = first_slot_S.repeat_interleave(lengths_S, output_size=len(position_T)) + position_T
        return cls(
            qkv_format="sbhd",  # keeps Megatron from its own per-sequence loop over "thd"
            cu_seqlens_q=mb.cu_seqlens, cu_seqlens_kv=mb.cu_seqlens,
            max_seqlen_q=mb.max_seqlen, max_seqlen_kv=mb.max_seqlen,
            position_ids=position_T, padded_index=slot_T,
        )  # fmt: skip


class PackedRope(torch.nn.Module):
    """Rotary embedding of each packed token at its own position, with the frequencies transformers computes."""

    def __init__(self, hf_config):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rope = LlamaRotaryEmbedding(hf_config)
        if rope.attention_scaling != 1.0:
            raise NotImplementedError(f"rope type {rope.rope_type!r} scales attention, which is not supported")
        self.inv_freq = rope.inv_freq.to(device())  # [head_dim / 2], kept out of state and dtype casts

    def get_rotary_seq_len(self, inference_context, decoder, hidden, config, packing: Packing) -> Packing:
        return packing  # what GPTModel hands on to forward()

    def forward(self, packing: Packing, **unused) -> torch.Tensor:
        angles = torch.outer(packing.position_ids.float(), self.inv_freq)  # [T, head_dim / 2]
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]  # [T, 1, 1, head_dim]


class PackedAttention(torch.nn.Module):
    """Causal attention inside each packed sequence: pad to [S, max_seqlen], one scaled_dot_product_attention, unpad.

    Padding stands right of every real token, so the causal mask alone keeps it out. No Transformer Engine, CPU and GPU
    alike.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **unused):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, packed_seq_params: Packing, **unused) -> torch.Tensor:
        """query [T, 1, heads, d], key and value [T, 1, kv_heads, d] → [T, 1, heads * d]."""
        index, max_seqlen = packed_seq_params.padded_index, packed_seq_params.max_seqlen_q
        sequences = len(packed_seq_params.cu_seqlens_q) - 1

        def pad(x):  # [T, 1, n, d] → [S, n, max_seqlen, d]
            padded = x.new_zeros(sequences * max_seqlen, *x.shape[2:]).index_copy(0, index, x.squeeze(1))
            return padded.view(sequences, max_seqlen, *x.shape[2:]).transpose(1, 2)

        grouped = query.shape[2] != key.shape[2]
        out = F.scaled_dot_product_attention(
            pad(query), pad(key), pad(value), is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )
        out = out.transpose(1, 2).reshape(sequences * max_seqlen, -1)  # [S * max_seqlen, heads * d]
        return out.index_select(0, index).unsqueeze(1)  # [T, 1, heads * d]


class HiddenGPT(GPTModel):
    """A GPTModel that ends with the last hidden state, so that logits are made only where a log-prob is wanted."""

    def _postprocess(self, hidden_states, *args, **kwargs) -> torch.Tensor:
        return hidden_states


def transformer_config(hf, parallel, dtype: torch.dtype, extra: dict) -> TransformerConfig:
    """The Megatron configuration of a Hugging Face `hf` config; `extra` overrides any field.

    Megatron raises on what it refuses.
    """
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
        add_qkv_bias=hf.architectures[0] == "Qwen2ForCausalLM",
        qk_layernorm=hf.architectures[0] == "Qwen3ForCausalLM",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sp and parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        variable_seq_lengths=parallel.pp > 1,  # packed rows differ in length
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, with or without experts
        calculate_per_token_loss=True,  # gradients are sums, divided once by the global denominator
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,  # needs Apex or Transformer Engine
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    return TransformerConfig(**{**settings, **options_for(TransformerConfig, extra)})


def head_dim(hf) -> int:
    """Width of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


CONFIG_CLASSES = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


def megatron_fields(*classes: type) -> set[str]:
    """Names of the fields of Megatron's config `classes` (all three if none is given)."""
    return {field.name for cls in classes or CONFIG_CLASSES for field in dataclasses.fields(cls)}


def options_for(cls: type, options: dict) -> dict:
    """Those of `options` that are fields of `cls`; a name that several classes share goes to each of them."""
    return {name: value for name, value in options.items() if name in megatron_fields(cls)}


FAMILIES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")


def check_model(path: str, parallel, rollout_tp: int, max_tokens: int, dtype: str, extra: dict) -> None:
    """See, without weights or process groups, that the model of `path` can be built and split.

    `max_tokens`: the longest sample; `extra`: the megatron section of the configuration. Raises ValueError naming the
    key.
    """
    try:
        hf = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={path}: {str(error).splitlines()[0]}") from None
    family = (hf.architectures or ["?"])[0]
    if family not in FAMILIES:
        raise ValueError(f"model.path={path} is a {family}; supported are {', '.join(FAMILIES)}")
    for attribute in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(hf, attribute, False):
            raise ValueError(f"model.path={path}: {attribute}=true in its config.json is not supported")
    if hf.hidden_act != "silu":
        raise ValueError(f"model.path={path}: hidden_act={hf.hidden_act!r} is not supported, only 'silu'")
    sizes = {
        "attention heads": hf.num_attention_heads,
        "key-value heads": hf.num_key_value_heads,
        "feed-forward size": hf.intermediate_size,
        "vocabulary size": hf.vocab_size,
    }
    engine_sizes = {what: sizes[what] for what in ("attention heads", "feed-forward size")}  # vLLM pads the others
    for key, by, divided in (("parallel.tp", parallel.tp, sizes), ("rollout.tp", rollout_tp, engine_sizes)):
        legal = [n for n in range(1, hf.num_attention_heads + 1) if not any(size % n for size in divided.values())]
        for what, size in divided.items():
            if size % by:
                raise ValueError(f"{key}={by} does not divide the model's {what} {size}; legal are {legal}")
    layers, vpp = hf.num_hidden_layers, parallel.vpp
    if layers % (parallel.pp * vpp):
        legal = [n for n in range(1, layers + 1) if layers % (n * vpp) == 0]
        raise ValueError(
            f"parallel.pp={parallel.pp} × parallel.vpp={vpp} does not divide the model's {layers} layers; "
            f"legal for parallel.pp are {legal}"
        )
    if max_tokens > hf.max_position_embeddings:
        raise ValueError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {max_tokens} is beyond the model's "
            f"{hf.max_position_embeddings} positions"
        )
    try:
        transformer_config(hf, parallel, DTYPES[dtype], extra)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"Megatron-core refuses this layout or the megatron section: {error}") from None


def build_model(path: str, parallel, dtype: torch.dtype, extra: dict) -> list[DistributedDataParallel]:
    """This rank's model chunks (one, or `vpp`), built from the Hugging Face folder `path`, with its weights."""
    hf = transformers.AutoConfig.from_pretrained(path)
    config = transformer_config(hf, parallel, dtype, extra)
    chunks = []
    for stage in range(parallel.vpp):
        vp_stage = stage if parallel.vpp > 1 else None
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        attention = spec.submodules.self_attention.submodules
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
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
        chunks.append(model.to(device(), dtype))
    settings = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    ddp_config = DistributedDataParallelConfig(**{**settings, **options_for(DistributedDataParallelConfig, extra)})
    model = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    for chunk in model:
        chunk.hf_config = hf
    config.finalize_model_grads_func = finalize_model_grads
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
    return get_megatron_optimizer(OptimizerConfig(**{**settings, **options_for(OptimizerConfig, extra)}), model)


def set_learning_rate(optimizer, lr: float) -> None:
    """Learning rate of the next step, for every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


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

    hidden [T (/ tp under sequence parallelism), 1, h], targets and mask [1, T] → logp_T, entropy_T [T] fp32. Logits
    exist for masked-in rows only, LOGITS_CHUNK at a time, and are made anew in the backward pass: a full [T, V] would
    not fit.
    """
    model = unwrap_model(model)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    weight = model.output_layer.weight if weight is None else weight
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)  # [T, 1, h]; the backward pass reduce-scatters
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)  # the backward pass all-reduces
    rows_R = mask[0].nonzero()[:, 0]

    def chunk_logprobs(hidden_R, targets_R):
        return vocab_parallel_logp(F.linear(hidden_R, weight).float() / temperature, targets_R)

    def chunks(x):
        return x.split(LOGITS_CHUNK)

    hidden_R, targets_R = hidden[:, 0].index_select(0, rows_R), targets[0].index_select(0, rows_R)
    if len(rows_R) > LOGITS_CHUNK:
        checkpoint = partial(torch.utils.checkpoint.checkpoint, chunk_logprobs, use_reentrant=False)
        logp_R, entropy_R = map(torch.cat, zip(*map(checkpoint, chunks(hidden_R), chunks(targets_R)), strict=True))
    else:
        logp_R, entropy_R = chunk_logprobs(hidden_R, targets_R)
    zeros_T = logp_R.new_zeros(mask.shape[1])
    return zeros_T.index_copy(0, rows_R, logp_R), zeros_T.index_copy(0, rows_R, entropy_R)


def forward_step(micro_batches: Iterator, model, loss_func: Callable, temperature: float):
    """Megatron's forward_step: the next micro-batch through one model chunk.

    On the last stage, `loss_func(mb, logp_T, entropy_T)`.
    """
    mb = next(micro_batches)
    packing = Packing.of(mb)
    output = model(mb.tokens, mb.position_ids, attention_mask=None, packed_seq_params=packing)
    if not unwrap_model(model).post_process:
        return output, None
    logp_T, entropy_T = token_logprobs(model, output, mb.targets, mb.mask, temperature)
    return logp_T, lambda logp_T: loss_func(mb, logp_T, entropy_T)


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

# Weight of a Megatron layer → (how it is joined, the Hugging Face weights of the layer it is made of).
#   copy     one tensor, the same on every tensor-parallel rank
#   rows     one tensor, split by output rows        cols  one tensor, split by input columns
#   qkv      query, key, value interleaved by key-value group, split by groups
#   gate_up  gate above up, each split by rows
LAYER_RULES = {
    "input_layernorm.weight": ("copy", ["input_layernorm.weight"]),
    "self_attention.linear_qkv.weight": ("qkv", [f"self_attn.{x}_proj.weight" for x in "qkv"]),
    "self_attention.linear_qkv.bias": ("qkv", [f"self_attn.{x}_proj.bias" for x in "qkv"]),
    "self_attention.q_layernorm.weight": ("copy", ["self_attn.q_norm.weight"]),
    "self_attention.k_layernorm.weight": ("copy", ["self_attn.k_norm.weight"]),
    "self_attention.linear_proj.weight": ("cols", ["self_attn.o_proj.weight"]),
    "pre_mlp_layernorm.weight": ("copy", ["post_attention_layernorm.weight"]),
    "mlp.linear_fc1.weight": ("gate_up", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
    "mlp.linear_fc2.weight": ("cols", ["mlp.down_proj.weight"]),
}
TOP_RULES = {
    "embedding.word_embeddings.weight": ("rows", ["model.embed_tokens.weight"]),
    "decoder.final_layernorm.weight": ("copy", ["model.norm.weight"]),
    "output_layer.weight": ("rows", ["lm_head.weight"]),
}
SPLIT_DIM = {"copy": None, "rows": 0, "cols": 1, "qkv": 0, "gate_up": 1}  # of the joined view


def rule_of(name: str, hf) -> tuple[str, list[str]]:
    """(join, Hugging Face names) of a Megatron weight with a global layer number.

    Raises KeyError for a name without a rule.
    """
    if name == "output_layer.weight" and hf.tie_word_embeddings:  # the last stage's copy of the embedding
        return TOP_RULES["embedding.word_embeddings.weight"]
    if name in TOP_RULES:
        return TOP_RULES[name]
    _, _, layer, rest = name.split(".", 3)  # decoder.layers.7.rest
    join, parts = LAYER_RULES[rest]
    return join, [f"model.layers.{layer}.{part}" for part in parts]


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
    """This rank's parameters by Megatron name, with the layer's number in the whole model."""
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
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    handles = {file: safe_open(file, framework="pt") for file in set(files.values())}
    for name, parameter in named_weights(model).items():
        join, parts = rule_of(name, hf)
        whole = joined(join, [handles[files[part]].get_tensor(part) for part in parts], hf)
        shard = whole if SPLIT_DIM[join] is None else whole.chunk(size, SPLIT_DIM[join])[rank]
        if shard.numel() != parameter.numel():
            raise ValueError(
                f"{parts[0]} of {path} gives {tuple(shard.shape)}, but {name} has {tuple(parameter.shape)}"
            )
        parameter.data.copy_(shard.reshape(parameter.shape))


def check_weights(path: str) -> None:
    """See that the safetensors of the folder `path` hold just the tensors the model is made of. Raises ValueError."""
    hf = transformers.AutoConfig.from_pretrained(path)
    absent = set()
    if hf.architectures[0] != "Qwen2ForCausalLM":
        absent.add("self_attention.linear_qkv.bias")
    if hf.architectures[0] != "Qwen3ForCausalLM":
        absent |= {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    rules = [f"decoder.layers.{i}.{rest}" for i in range(hf.num_hidden_layers) for rest in LAYER_RULES.keys() - absent]
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

    Buckets of about `bucket_bytes` cross the wire: one all-gather over the tensor-parallel ranks of the owning pipeline
    stage and one broadcast over the stages, so a rank never holds more than a bucket besides its own shard.
    """
    hf, own = model[0].hf_config, named_weights(model)
    tp_group, tp = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()
    pp_group, pp_rank = mpu.get_pipeline_model_parallel_group(), mpu.get_pipeline_model_parallel_rank()
    stages = [None] * mpu.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, {name: weight.shape for name, weight in own.items()}, group=pp_group)
    for stage, bucket in buckets(stages, hf, bucket_bytes, model[0].config.params_dtype.itemsize):
        numels = [stages[stage][name].numel() for name in bucket]
        flat = torch.empty(tp, sum(numels), dtype=model[0].config.params_dtype, device=device())
        if stage == pp_rank:
            local = torch.cat([own[name].detach().reshape(-1) for name in bucket])
            dist.all_gather(list(flat), local, group=tp_group) if tp > 1 else flat[0].copy_(local)
        if len(stages) > 1:
            dist.broadcast(flat, dist.get_global_rank(pp_group, stage), group=pp_group)
        for name, shards in zip(bucket, flat.split(numels, dim=1), strict=True):  # shards [tp, numel]
            join, parts = rule_of(name, hf)
            views = [local_view(join, shard, stages[stage][name], hf) for shard in shards]
            whole = views[0] if SPLIT_DIM[join] is None else torch.cat(views, dim=SPLIT_DIM[join])
            yield from zip(parts, (part.contiguous() for part in parted(join, whole, hf)), strict=True)


def buckets(stages: list[dict], hf, limit: int, itemsize: int) -> Iterator[tuple[int, list[str]]]:
    """Group the weights of all pipeline stages, in layer order, into (stage, names) of about `limit` bytes.

    A layer stays whole.
    """

    def position(name: str) -> int:
        if name.startswith("decoder.layers."):
            return int(name.split(".")[2])
        return -1 if name.startswith("embedding.") else hf.num_hidden_layers

    owners = {name: stage for stage, weights in enumerate(stages) for name in weights}
    if hf.tie_word_embeddings:
        owners.pop("output_layer.weight", None)
    bucket, held, last = [], 0, None
    for name in sorted(owners, key=position):
        here = (owners[name], position(name))
        if bucket and (here[0] != last[0] or (here != last and held >= limit)):
            yield last[0], bucket
            bucket, held = [], 0
        bucket, held, last = [*bucket, name], held + stages[here[0]][name].numel() * itemsize, here
    yield last[0], bucket


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
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
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
