"""Between Hugging Face and Megatron-core: process groups, model, forward pass, optimizer, weights in and out.

It knows nothing of rewards, groups, advantages or prompts. Of a micro-batch `mb` the forward pass reads `tokens,
position_ids, mask` (each [1, T]), `weights` ([1, T] or None; 0 where a token has no part in the loss), `sizes` [S] and
`replay`: a row of T tokens packs S sequences, one after another. Where these share a prompt, C of the T positions are
computed; see MicroBatch in grpo/step/records.py. Log-probs are in grpo/parts/model/head.py.

Weights are exchanged as (Hugging Face name, full tensor) pairs: `load_weights` reads them, `hf_weights` yields them,
for vLLM and for the export alike. One table, `FAMILIES`, maps each weight of a Megatron layer to Hugging Face weights.
"""

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Container, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open

from config import Config, LoraConfig, TrainingError
from grpo.parts.base import hf_folder
from grpo.parts.base.hf_folder import head_dim
from grpo.parts.base.ranks import device
from grpo.parts.model import fp16, lora, matched, routes
from grpo.parts.model.attention import (
    PackedAttention,
    Packing,
    own_stripe,
    rotary_embedding,
    sliding_window,
)
from grpo.parts.model.experts import experts_for
from grpo.parts.model.gated_delta import GatedDeltaNet
from grpo.parts.model.head import HeadLogp
from grpo.parts.model.layers import (  # before Megatron-core
    Activation,
    HiddenGPT,
    RMSNorm,
    Router,
    submodules,
)

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: F401, for the script
from megatron.core.tensor_parallel import (
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import unwrap_model

from grpo.parts.model.offload import take_back_state
from grpo.parts.model.optimizer_state import main_weights, mend_state_index, set_adam_steps, trainable_weights
from grpo.parts.model.stages import stage_layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET_BYTES = 512 << 20  # default size of a bucket of weights
ALL_WEIGHTS = LoraConfig()  # rank 0: all weights are trained, none has adapters


# ---------------------------------------------------------------- process groups


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
        create_gloo_process_groups=False,  # those are for Megatron's own checkpoints
    )
    model_parallel_cuda_manual_seed(seed)


def seed_step(seed: int, step: int) -> None:
    """Seed Megatron's and torch's random streams for a step, so that a resumed run draws the same (for dropout)."""
    model_parallel_cuda_manual_seed(seed * 1_000_003 + step, force_reset_rng=True)
    torch.manual_seed(seed * 1_000_003 + step)


def process_groups() -> dict[str, dist.ProcessGroup]:
    """Every process group of this rank that training communicates over, by name."""
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


def reports_loss() -> bool:
    """Whether this rank reports its replica's losses: last pipeline stage, first tensor- and context-parallel rank."""
    first = mpu.get_tensor_model_parallel_rank() == 0 and first_of_context()
    return first and mpu.is_pipeline_last_stage(ignore_virtual=True)


def token_multiple(parallel) -> int:
    """The length of a packed row is a multiple of this: context parallelism, then tensor parallelism, split the row."""
    return parallel.tp * parallel.cp


# ---------------------------------------------------------------- model


def transformer_config(
    hf,
    parallel,
    dtype: torch.dtype,
    extra: dict,
    match_engine=False,
) -> TransformerConfig:
    """The Megatron configuration of a Hugging Face `hf` config; `extra` overrides any field.

    Megatron raises on what it refuses.
    """
    settings = architecture_options(hf) | parallel_options(parallel) | moe_options(hf)
    settings |= dict(
        # numbers
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        calculate_per_token_loss=True,  # gradients are sums, divided once by the global denominator
        use_cpu_initialization=not torch.cuda.is_available(),
        # kernels, all of them ours
        gradient_accumulation_fusion=torch.cuda.is_available(),  # by add_product, not by Apex
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=not extra.get("bias_activation_fusion"),  # the slot for our Activation
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )

    if match_engine:
        settings |= matched.OPTIONS
    settings |= options_for(TransformerConfig, extra)
    if settings["moe_token_dispatcher_type"] == "allgather":  # its rows have one length: packing.py
        settings["variable_seq_lengths"] = False
    return TransformerConfig(**settings)


def architecture_options(hf) -> dict:
    """Fields of TransformerConfig that follow from the architecture alone, without those for experts."""
    rules = FAMILIES[hf.architectures[0]]
    window = sliding_window(hf)

    options = dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=getattr(hf, "intermediate_size", None) or expert_width(hf),
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        window_size=(window - 1, 0) if window else None,  # read by Packing
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias="self_attention.linear_qkv.bias" in rules,
        qk_layernorm="self_attention.q_layernorm.weight" in rules,
    )
    if not has_linear_attention(hf):
        return options

    shapes = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    options |= {f"linear_{name}": getattr(hf, f"linear_{name}") for name in shapes}
    return options | {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}


def parallel_options(parallel) -> dict:
    """Fields of TransformerConfig that say how the model is split over ranks."""
    return dict(
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sp and parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        # Packed rows differ in length. Interleaved stages get rows of one length: between two stages Megatron 0.16
        # swaps the lengths it sends in the two directions, and the rows themselves too unless sends overlap.
        variable_seq_lengths=parallel.pp > 1 and parallel.vpp == 1,
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        batch_p2p_sync=False,  # Megatron waits after each hand-over for the sake of older versions of torch
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )


def moe_options(hf) -> dict:
    """Fields of TransformerConfig for experts."""
    options = dict(
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, with or without experts
        moe_aux_loss_coeff=0.0,
    )
    if not is_moe(hf):
        return options

    return options | dict(
        num_moe_experts=num_experts(hf),
        moe_ffn_hidden_size=expert_width(hf),
        moe_grouped_gemm=True,  # by torch: grpo/parts/model/experts.py
        moe_router_topk=hf.num_experts_per_tok,
        # Top-k of the softmax, or the softmax of the top-k: the same as renormalising the top-k probabilities.
        moe_router_pre_softmax=not getattr(hf, "norm_topk_prob", True),
        moe_shared_expert_intermediate_size=getattr(hf, "shared_expert_intermediate_size", None),
        moe_shared_expert_gate="mlp.shared_experts.gate_weight" in FAMILIES[hf.architectures[0]],
    )


def has_linear_attention(hf, layer: int | None = None) -> bool:
    """Whether a layer, or any, is one of linear attention (grpo/parts/model/gated_delta.py)."""
    kinds = getattr(hf, "layer_types", None) or []
    return "linear_attention" in (kinds if layer is None else kinds[layer : layer + 1])


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


def options_for(cls: type, options: dict) -> dict:
    """Those of `options` that are fields of `cls`; a name that several classes share goes to each of them."""
    return {field.name: options[field.name] for field in dataclasses.fields(cls) if field.name in options}


def build_model(
    path: str,
    parallel,
    dtype: torch.dtype,
    extra: dict,
    fp32_head=False,
    weights=True,
    adapters=ALL_WEIGHTS,
    match_engine=False,
) -> list[DistributedDataParallel]:
    """This rank's model chunks (one, or `vpp`), built from the Hugging Face folder `path`, with its `weights`.

    `extra` overrides fields of Megatron's configurations. `fp32_head` computes logits in fp32 for any `dtype`.
    `adapters` is the section `lora` of the configuration, where rank 0 trains all weights, or None for a model without
    gradients.
    """
    hf = hf_folder.read_config(path)
    config = transformer_config(hf, parallel, dtype, extra, match_engine)

    vp_stages = range(parallel.vpp) if parallel.vpp > 1 else [None]
    chunks = []
    for vp_stage in vp_stages:
        model = build_chunk(hf, config, vp_stage, adapters)
        model.fp32_head, model.matches = fp32_head, match_engine
        if match_engine:
            matched.attach(model)
        chunks.append(model.to(device(), dtype))

    settings = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    ddp_config = DistributedDataParallelConfig(**settings | options_for(DistributedDataParallelConfig, extra))
    model = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    for chunk in model:
        chunk.hf_config = hf

    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:  # only the last micro-batch starts the reduction
        config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync

    if weights:
        load_weights(model, path)
    for chunk in model:
        chunk.broadcast_params()
    return model


def build_chunk(
    hf,
    config: TransformerConfig,
    vp_stage: int | None,
    adapters: LoraConfig | None,
) -> HiddenGPT:
    """One model chunk of this rank, its weights not loaded. `vp_stage` is its number, None where there is only one."""
    layers = stage_layers(config)[mpu.get_pipeline_model_parallel_rank()][vp_stage or 0]
    specs = [layer_spec(hf, config, adapters, has_linear_attention(hf, layer)) for layer in layers]
    model = HiddenGPT(
        config,
        TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="none",  # PackedAttention applies RoPE
        vp_stage=vp_stage,
    )
    if [layer.layer_number - 1 for layer in model.decoder.layers] != [*layers]:
        raise TrainingError(f"Megatron-core built other layers than {layers} of the model for a pipeline stage")
    # A copy is no buffer, which a cast of the model would round: torch knows a buffer by a mark on its tensor.
    model.inv_freq = rotary_embedding(hf).inv_freq.clone().to(device())
    if model.post_process:  # still a module, whose hooks wait for weights that are on their way
        model.output_layer.forward = HeadLogp.apply
    lora.attach(model, adapters)
    for name, parameter in model.named_parameters():
        if is_expert(name):  # Megatron 0.16 does not mark them at ep 1, and would reduce over too few ranks
            parameter.allreduce = False
    return model


def layer_spec(
    hf,
    config: TransformerConfig,
    adapters: LoraConfig | None,
    is_linear: bool,
) -> ModuleSpec:
    """Megatron's spec of one transformer layer, with our norm, attention, activation, router and experts.

    `is_linear`: its attention is linear.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm

    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    if is_linear:
        spec.submodules.self_attention = ModuleSpec(GatedDeltaNet)

    mlp = submodules(spec.submodules.mlp)
    if not is_moe(hf):
        mlp.activation_func = Activation
        return spec

    mlp.router = Router
    lora_rank = adapters.rank if adapters else 0
    mlp.experts = ModuleSpec(experts_for(config, lora_rank), submodules=submodules(mlp.experts))
    mlp.experts.submodules.activation_func = Activation
    submodules(mlp.shared_experts).activation_func = Activation
    return spec


def build_optimizer(model: list, train, extra: dict, path: str | None = None):
    """AdamW with fp32 main weights, its state sharded over the replicas (Megatron's distributed optimizer).

    `train`: lr, weight_decay, adam_beta1, adam_beta2, clip_grad; `extra` overrides any field. `path`: the folder from
    which `load_weights` has filled the model. Where it rounded a weight, say from fp32 to bf16, the main weight begins
    with the folder's value. If it began with the rounded one, the bf16 weight would not change before its updates add
    up to half a unit in the last place.
    """
    dtype = model[0].config.params_dtype
    settings = dict(
        optimizer="adam",
        lr=train.lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        clip_grad=train.clip_grad,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        initial_loss_scale=fp16.initial_scale(train.max_tokens_per_micro_batch, extra.get("min_loss_scale", 1.0)),
        hysteresis=1,  # overflows before it is halved
        use_distributed_optimizer=True,
        optimizer_offload_fraction=1.0,  # of the state, with megatron.optimizer_cpu_offload
        pin_cpu_grads=torch.cuda.is_available(),
    )
    config = OptimizerConfig(**settings | options_for(OptimizerConfig, extra))
    with torch.no_grad():  # else shards of fp32 weights have a history, and Adam on the host refuses them
        optimizer = get_megatron_optimizer(config, model, use_gloo_process_groups=False)
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if part.optimizer]  # with weights
    if config.fp16:
        model[0].config.grad_scale_func = optimizer.scale_loss
    for part in optimizer.chained_optimizers:
        mend_state_index(part)
        if torch.cuda.is_available() and isinstance(part.optimizer, torch.optim.Adam):  # not Adam on the host
            for group in part.optimizer.param_groups:
                group["fused"] = True  # all weights in one kernel
        set_adam_steps(part, 0)  # torch makes the state at the first update; a checkpoint needs it before

    if path:  # what was rounded is read again: weights, and adapters, which are drawn in fp32
        mains = {weight: main for weight, main in main_weights(model, optimizer).items() if weight.is_rounded}
        for weight, shard in read_weights(model, path, chosen=mains):
            place, main = mains[weight]
            main.copy_(shard.flatten()[place])
    return optimizer


def zero_gradients(model: list, optimizer) -> None:
    """Zero the gradients, allocating them again if they were freed; before the first micro-batch of an update."""
    optimizer.zero_grad()
    for chunk in model:
        chunk.restore_grad_buffers()
        chunk.zero_grad_buffer()


def optimizer_step(optimizer, lr: float, offloaded: bool) -> float:
    """Update the weights with learning rate `lr`; returns the norm of the gradient before clipping, on every rank.

    The update is skipped where the norm is NaN, infinite or exactly 0 (Adam would then move the weights by momentum and
    weight decay alone). In fp16 the gradient is divided by the loss scale here, which Megatron halves where the norm is
    not finite. `offloaded`: the optimizer's state may be on the host and is copied back first.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr

    scalers = fp16.loss_scalers(optimizer)  # of experts and of the rest
    states = [scaler.state_dict() for scaler in scalers]
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    for scaler, state in zip(scalers, states, strict=True):  # one of them may have overflowed alone
        scaler.load_state_dict(state)
        scaler.update(not math.isfinite(norm))
    if not math.isfinite(norm) or norm == 0:
        return norm

    # The rest of Megatron's own step, which would divide by the loss scale and compute the norm once more.
    if offloaded:
        take_back_state(optimizer)
    for part in optimizer.chained_optimizers:
        weights = part.get_parameters()
        if part.config.clip_grad > 0 and weights:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(weights, part.config.clip_grad, norm, decoupled)
    optimizer.step_with_ready_grads()
    return norm


# ---------------------------------------------------------------- forward pass


def hidden_states(model, mb) -> torch.Tensor:
    """Forward pass of a micro-batch through one model chunk: [C / cp (/ tp under sequence parallelism), 1, h]."""
    chunk = unwrap_model(model)
    options = {}
    if chunk.config.num_moe_experts:
        counted = mb.mask if mb.weights is None else mb.weights != 0  # [1, T], what routers count
        untrained = own_stripe(~mb.at_any_copy(counted))  # [1, C / cp]
        if chunk.config.sequence_parallel and not chunk.pre_process:  # Megatron 0.16 splits it on the first stage only
            untrained = untrained.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)
            untrained = untrained[mpu.get_tensor_model_parallel_rank()].contiguous()
        options = {"padding_mask": untrained}
    tokens, positions = (own_stripe(mb.computed(values)) for values in (mb.tokens, mb.position_ids))  # [1, C / cp]
    packing = Packing.of(mb, chunk.inv_freq, chunk.config)
    if "routes" in mb.replay:
        routes.set_routes(chunk, mb)
    return model(tokens.long().contiguous(), positions, attention_mask=None, packed_seq_params=packing, **options)


def first_of_context() -> bool:
    """Whether this is the first context-parallel rank. All have the log-probs of a whole row; only the first counts."""
    return mpu.get_context_parallel_rank() == 0


# ---------------------------------------------------------------- weights in and out

# The weights of one layer: Megatron name → (join: how to merge, the Hugging Face weights that it merges).
#   copy     one tensor, the same on every tensor-parallel rank
#   rows     one tensor, split by output rows        cols  one tensor, split by input columns
#   qkv      query, key, value interleaved by key-value group, split by rows, also within a group
#   gated_qkv  the same, with a gate for each query head, after the queries of a group
#   delta    what goes into linear attention, interleaved by key head, split by rows; conv: its convolution, likewise
#   gate_up  gate above up, each split by rows
#   stack    several, the same on every rank: LoRA's A
# "{e}" stands for the number of an expert.
COMMON = {
    "input_layernorm.weight": ("copy", ["input_layernorm.weight"]),
    "self_attention.linear_qkv.weight": ("qkv", [f"self_attn.{x}_proj.weight" for x in "qkv"]),
    "self_attention.linear_proj.weight": ("cols", ["self_attn.o_proj.weight"]),
    "pre_mlp_layernorm.weight": ("copy", ["post_attention_layernorm.weight"]),
}
LINEAR_ATTENTION = {  # in place of the rules for self_attention
    "self_attention.linear_qkv.weight": ("delta", [f"linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")]),
    "self_attention.conv": ("conv", ["linear_attn.conv1d.weight"]),
    "self_attention.A_log": ("rows", ["linear_attn.A_log"]),
    "self_attention.dt_bias": ("rows", ["linear_attn.dt_bias"]),
    "self_attention.norm": ("copy", ["linear_attn.norm.weight"]),
    "self_attention.linear_proj.weight": ("cols", ["linear_attn.out_proj.weight"]),
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


def expert_rules(block: str, gate: str, up: str, down: str) -> dict:
    """Rules of a router and its experts; Hugging Face names them `block`.experts.{e}.`gate`, `up` and `down`."""
    local, expert = "mlp.experts.local_experts.{e}", f"{block}.experts.{{e}}"
    return {
        "mlp.router.weight": ("copy", [f"{block}.gate.weight"]),
        f"{local}.linear_fc1.weight": ("gate_up", [f"{expert}.{gate}.weight", f"{expert}.{up}.weight"]),
        f"{local}.linear_fc2.weight": ("cols", [f"{expert}.{down}.weight"]),
    }


GATED_QKV = {"self_attention.linear_qkv.weight": ("gated_qkv", [f"self_attn.{x}_proj.weight" for x in "qkv"])}
QWEN_EXPERTS = expert_rules("mlp", "gate_proj", "up_proj", "down_proj")
# Architecture in config.json → the rules of its layer, from which transformer_config reads some of Megatron's options.
FAMILIES = {
    "LlamaForCausalLM": COMMON | DENSE,
    "MistralForCausalLM": COMMON | DENSE,
    "MixtralForCausalLM": COMMON | expert_rules("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen2ForCausalLM": COMMON | QKV_BIAS | DENSE,
    "Qwen2MoeForCausalLM": COMMON | QKV_BIAS | QWEN_EXPERTS | SHARED_EXPERT,
    "Qwen3ForCausalLM": COMMON | QK_NORM | DENSE,
    "Qwen3MoeForCausalLM": COMMON | QK_NORM | QWEN_EXPERTS,
    "Qwen3_5ForCausalLM": COMMON | GATED_QKV | QK_NORM | DENSE,
    "Qwen3_5MoeForCausalLM": COMMON | GATED_QKV | QK_NORM | QWEN_EXPERTS | SHARED_EXPERT,
}
# Folders with images, whose language model is trained; its weights have a longer prefix.
FAMILIES |= {f"{x}ForConditionalGeneration": FAMILIES[f"{x}ForCausalLM"] for x in ("Qwen3_5", "Qwen3_5Moe")}
TOP_RULES = {
    "embedding.word_embeddings.weight": ("rows", ["model.embed_tokens.weight"]),
    "decoder.final_layernorm.weight": ("copy", ["model.norm.weight"]),
    "output_layer.weight": ("rows", ["lm_head.weight"]),
}
BY_HEADS = ("qkv", "gated_qkv", "delta", "conv")  # interleaved by groups of heads
SPLIT_DIM = {"copy": None, "stack": None, "rows": 0, "cols": 1, "gate_up": 1} | dict.fromkeys(BY_HEADS, 0)
EXPERT = re.compile(r"(?<=local_experts\.)\d+")  # an expert's number in a Megatron name


def rule_of(name: str, hf) -> tuple[str, list[str]]:
    """(join, Hugging Face names) of a Megatron weight whose name counts layers and experts over the whole model.

    Raises KeyError for a name without a rule.
    """
    if name.endswith(lora.FACTORS):
        return lora.factor_rule(name, *rule_of(lora.weight_of(name), hf))
    if name == "output_layer.weight" and hf.tie_word_embeddings:  # the last stage's copy of the embedding
        name = "embedding.word_embeddings.weight"
    if name in TOP_RULES:
        join, parts = TOP_RULES[name]
        return join, [re.sub("^model", hf.prefix, part) for part in parts]
    _, _, layer, rest = name.split(".", 3)  # decoder.layers.7.rest
    join, parts = layer_rules(hf, int(layer))[EXPERT.sub("{e}", rest)]
    expert = EXPERT.search(rest)
    if expert:
        parts = [part.replace("{e}", expert[0]) for part in parts]
    return join, [f"{hf.prefix}.layers.{layer}.{part}" for part in parts]


def layer_rules(hf, layer: int) -> dict:
    """The rules of a layer's weights."""
    rules = FAMILIES[hf.architectures[0]]
    if not has_linear_attention(hf, layer):
        return rules
    return {name: rule for name, rule in rules.items() if not name.startswith("self_attention.")} | LINEAR_ATTENTION


def shard_group(name: str) -> tuple:
    """(process group that shards a weight, how many ranks split one tensor): for experts ep × etp ranks, and etp."""
    if is_expert(name):
        return mpu.get_expert_tensor_and_model_parallel_group(), mpu.get_expert_tensor_parallel_world_size()
    return mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()


def expert_of(name: str, hf, ep_rank: int) -> str:
    """The name with the expert's number in the whole layer instead of that on expert-parallel rank `ep_rank`."""
    if not is_expert(name):
        return name
    experts_per_rank = num_experts(hf) // mpu.get_expert_model_parallel_world_size()
    return EXPERT.sub(lambda local: str(ep_rank * experts_per_rank + int(local[0])), name)


def group_rows(join: str, hf) -> tuple[int, list[list[int]]]:
    """How many groups of heads a merged weight has, and how many rows of each block of each part a group has."""
    if join in ("delta", "conv"):  # q, k and v; z; b; a
        repeat = hf.linear_num_value_heads // hf.linear_num_key_heads
        d, e = hf.linear_key_head_dim, repeat * hf.linear_value_head_dim
        return hf.linear_num_key_heads, [[d, d, e], [e], [repeat], [repeat]][: 1 if join == "conv" else None]
    d = head_dim(hf)
    queries = hf.num_attention_heads // hf.num_key_value_heads * d
    return hf.num_key_value_heads, [[2 * queries if join == "gated_qkv" else queries], [d], [d]]


def merge_parts(join: str, parts: list[torch.Tensor], hf) -> torch.Tensor:
    """The full merged tensor of the Hugging Face `parts`; tensor-parallel ranks split it along SPLIT_DIM[join]."""
    if join in BY_HEADS:
        groups, rows = group_rows(join, hf)
        split = (part.split([groups * size for size in sizes]) for part, sizes in zip(parts, rows, strict=True))
        blocks = [block.unflatten(0, (groups, -1)) for part in split for block in part]
        if join == "gated_qkv":  # query and gate of each head → the queries, then the gates
            blocks[0] = blocks[0].unflatten(1, (-1, 2, head_dim(hf))).transpose(1, 2).flatten(1, 3)
        return torch.cat(blocks, dim=1).flatten(0, 1)
    return torch.stack(parts) if join in ("gate_up", "stack") else parts[0]  # gate_up: [2, ffn, hidden]


def split_parts(join: str, whole: torch.Tensor, hf) -> list[torch.Tensor]:
    """Inverse of `merge_parts`: the Hugging Face tensors of a merged one."""
    if join in BY_HEADS:
        groups, rows = group_rows(join, hf)
        blocks = iter(whole.unflatten(0, (groups, -1)).split([*itertools.chain(*rows)], dim=1))
        parts = [[next(blocks).flatten(0, 1) for _ in sizes] for sizes in rows]
        if join == "gated_qkv":
            queries = parts[0][0].unflatten(0, (groups, 2, -1, head_dim(hf)))
            parts[0] = [queries.transpose(1, 2).flatten(0, 3)]
        return [blocks[0] if len(blocks) == 1 else torch.cat(blocks) for blocks in parts]
    return list(whole) if join in ("gate_up", "stack") else [whole]


def named_weights(model: list, factors: bool = False) -> dict[str, torch.nn.Parameter]:
    """This rank's weights, or adapters' `factors`, by Megatron name: layers counted over the model, experts locally."""
    weights = {}
    for chunk in map(unwrap_model, model):
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, layer, rest = name.split(".", 3)
                name = f"decoder.layers.{chunk.decoder.layers[int(layer)].layer_number - 1}.{rest}"
            if name.endswith(lora.FACTORS) == factors:
                weights[name] = parameter
    return weights


def load_weights(model: list, path: str) -> None:
    """Fill this rank's shard from the safetensors of `path`, rounded to the model's dtype."""
    for weight, shard in read_weights(model, path):
        weight.data.copy_(shard)
        weight.is_rounded = torch.promote_types(shard.dtype, weight.dtype) is not weight.dtype  # for build_optimizer


def read_weights(
    model: list,
    path: str,
    chosen: Container | None = None,
) -> Iterator[tuple]:
    """Yield (weight, this rank's shard of it as the safetensors of `path` have it), of all or the `chosen` weights, one
    tensor at a time.

    `check_weights` has compared the names; raises ValueError for a shape that does not fit.
    """
    hf = model[0].hf_config
    files = hf_folder.safetensor_files(path)
    handles = {file: safe_open(file, framework="pt") for file in set(files.values())}
    handle_of = {part: handles[file] for part, file in files.items()}
    for name, parameter in (named_weights(model) | named_weights(model, factors=True)).items():
        if chosen is not None and parameter not in chosen:
            continue
        join, parts = rule_of(expert_of(name, hf, mpu.get_expert_model_parallel_rank()), hf)
        group, size = shard_group(name)
        whole = merge_parts(join, [lora.read_part(part, handle_of, parameter.shape) for part in parts], hf)
        shard = whole if SPLIT_DIM[join] is None else whole.chunk(size, SPLIT_DIM[join])[group.rank() % size]
        if shard.numel() != parameter.numel():
            raise ValueError(f"{parts[0]} of {path} gives {tuple(shard.shape)}, {name} has {tuple(parameter.shape)}")
        yield parameter, shard.reshape(parameter.shape)


def hf_weights(
    model: list,
    bucket_bytes=BUCKET_BYTES,
    factors=False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every (Hugging Face name, full tensor) in layer order, on every rank; all ranks must drain it together.

    Adapters are merged into their weights. With `factors` they come alone, under PEFT's names. Weights travel in
    buckets of at most `bucket_bytes` or one tensor: one all-gather over the ranks that shard a weight, one broadcast
    over the pipeline stages. Besides its shard a rank holds a copy of its part of a bucket, the bucket and one full
    tensor.
    """
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:  # otherwise gathered only when the next forward pass reads them
            chunk.start_param_sync(force_sync=True)

    hf = model[0].hf_config
    params_dtype = model[0].config.params_dtype
    own = named_weights(model, factors)
    shapes = {name: weight.shape for name, weight in own.items()}
    stages = [None] * mpu.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, shapes, group=mpu.get_pipeline_model_parallel_group())

    for stage, names in buckets(stages, hf, bucket_bytes // params_dtype.itemsize):
        dtype = torch.float32 if is_fp32(names[0]) else params_dtype
        bucket_shapes = {name: stages[stage][name] for name in names}
        # Not kept under a name, so that it is gone before the next one is gathered
        yield from read_bucket(gather_bucket(own, bucket_shapes, stage, dtype), bucket_shapes, hf)


def hf_shards(model: list) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield what this rank holds of each weight: (Hugging Face name, number of the shard, tensor), adapters merged.

    Ranks that yield the same name and number hold copies. A Megatron weight that joins several Hugging Face weights
    comes as one tensor, under the first of their names. Queries, keys and values come as two tensors, and so does what
    goes into linear attention, since vLLM may copy the second one to more ranks: keys and values apart from queries,
    and b and a apart from the rest.
    """
    hf = model[0].hf_config
    for name, weight in named_weights(model).items():
        join, parts = rule_of(expert_of(name, hf, mpu.get_expert_model_parallel_rank()), hf)
        number = 0 if SPLIT_DIM[join] is None else shard_group(name)[0].rank()
        held = merged_weight(weight)
        if join not in BY_HEADS or len(parts) == 1:
            yield parts[0], number, held
            continue

        # Each group of heads has the rows of the first parts, then the rows of the other parts.
        _, rows = group_rows(join, hf)
        first = 2 if join == "delta" else 1  # number of the first parts
        group = sum(map(sum, rows))
        end = sum(map(sum, rows[:first]))
        offset = number * len(held) % group  # a shard may begin within a group, where ranks outnumber the groups
        cuts = []
        for start in range(-offset, len(held), group):
            cuts += [max(start + end, 0), max(start + group, 0)]
        pieces = held.tensor_split(cuts)
        yield parts[0], number, torch.cat(pieces[::2])
        yield parts[first], number, torch.cat(pieces[1::2])


def gather_bucket(
    own: dict,
    shapes: dict[str, torch.Size],
    stage: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """All-gather a bucket, the weights in `shapes` of a pipeline stage; on every rank [shards, elements of a shard]."""
    group, _ = shard_group(next(iter(shapes)))
    pp_group = mpu.get_pipeline_model_parallel_group()
    elements = sum(shape.numel() for shape in shapes.values())
    flat = torch.empty(group.size(), elements, dtype=dtype, device=device())

    if stage == pp_group.rank():
        local = torch.cat([merged_weight(own[name]).reshape(-1) for name in shapes])
        if len(flat) > 1:
            dist.all_gather(list(flat), local, group=group)
        else:
            flat[0].copy_(local)

    if pp_group.size() > 1:
        dist.broadcast(flat, dist.get_global_rank(pp_group, stage), group=pp_group)
    return flat


def merged_weight(weight: torch.nn.Parameter) -> torch.Tensor:
    """The weight, with its adapter added where it has one."""
    return lora.merged_weight(weight) if hasattr(weight, "adapter") else weight.detach()


def read_bucket(
    flat: torch.Tensor,
    shapes: dict[str, torch.Size],
    hf,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (Hugging Face name, full tensor) pairs of a bucket, none of them a view of it."""
    numels = [shape.numel() for shape in shapes.values()]
    for name, shards in zip(shapes, flat.split(numels, dim=1), strict=True):  # [shards, numel]
        _, split_ranks = shard_group(name)
        for ep_rank, split in enumerate(shards.split(split_ranks)):  # several only for experts
            join, names = rule_of(expert_of(name, hf, ep_rank), hf)
            shape = shapes[name] if join != "gate_up" else (2, shapes[name][0] // 2, shapes[name][1])
            views = [shard.view(shape) for shard in split]  # as merge_parts has them
            whole = views[0].clone() if SPLIT_DIM[join] is None else torch.cat(views, dim=SPLIT_DIM[join])
            yield from zip(names, (part.contiguous() for part in split_parts(join, whole, hf)), strict=True)
            del whole  # before the next one is made


def buckets(stages: list[dict], hf, limit: int) -> Iterator[tuple[int, list[str]]]:
    """Group the weights of all stages, in layer order, into (stage, names) of at most `limit` gathered elements.

    A bucket holds one tensor at least, and either experts, weights that are always fp32, or others.
    """
    owners = {name: stage for stage, weights in enumerate(stages) for name in weights}
    if hf.tie_word_embeddings:
        owners.pop("output_layer.weight", None)

    def kind(name: str) -> tuple[int, bool, bool]:
        return owners[name], is_expert(name), is_fp32(name)

    in_order = sorted(owners, key=lambda name: order_key(name, hf))
    for (stage, *_), names in itertools.groupby(in_order, kind):
        bucket, elements = [], 0
        for name in names:
            group, _ = shard_group(name)
            size = stages[stage][name].numel() * group.size()
            if bucket and elements + size > limit:
                yield stage, bucket
                bucket, elements = [], 0
            bucket.append(name)
            elements += size
        yield stage, bucket


def order_key(name: str, hf) -> tuple[int, bool]:
    """Sort key of a Megatron weight: (layer, whether it is an expert's).

    The embedding comes first and the head last. Weights that are always fp32 come before all, so that they share
    buckets.
    """
    if is_fp32(name):
        return -2, False
    if name.startswith("decoder.layers."):
        return int(name.split(".")[2]), is_expert(name)
    return (-1 if name.startswith("embedding.") else hf.num_hidden_layers), False


def is_fp32(name: str) -> bool:
    """Whether a Megatron weight is fp32 in a model of any dtype, as in vLLM's."""
    return name.endswith(".A_log")


def is_expert(name: str) -> bool:
    """Whether a Megatron weight is one of an expert's."""
    return EXPERT.search(name) is not None


def copy_weights(model: list, on: str = "gpu") -> list[torch.Tensor]:
    """A second set of `trainable_weights`, such as a reference's; on the "gpu" or, in pinned memory, on the "host"."""
    weights = [weight.detach() for weight in trainable_weights(model)]
    if on == "gpu":
        return [weight.clone() for weight in weights]
    pinned = torch.cuda.is_available()
    return [torch.empty(weight.shape, dtype=weight.dtype, pin_memory=pinned).copy_(weight) for weight in weights]


@contextlib.contextmanager
def swapped_weights(model: list, weights: list[torch.Tensor] | None) -> Iterator[None]:
    """Run the model with `weights`, which `copy_weights` gave, inside the block; None keeps its own.

    Weights on the host are copied to the GPU for the duration of the block.
    """
    if weights is None:
        yield
        return

    parameters = trainable_weights(model)
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, data in zip(parameters, weights, strict=True):
            if data.data_ptr() == parameter.data_ptr() and data.numel():
                raise TrainingError("the weights of the reference model or teacher are the policy's own memory")
            parameter.data = data.to(parameter.device, non_blocking=True)
        yield
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data


def export(model: list, base: str, cfg: Config, step: int) -> None:
    """Write the model as a Hugging Face folder, output_dir/hf/step_N, and adapters to output_dir/adapter/step_N.

    `base`: the folder of the initial model, whose tokenizer and configuration go along. Called on every rank.
    """
    hf_folder.export_hf(hf_weights(model), base, Path(cfg.output_dir, f"hf/step_{step:06d}"))
    if cfg.lora.rank:
        lora.export_adapter(hf_weights(model, factors=True), base, cfg, step)
