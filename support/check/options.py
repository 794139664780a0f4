"""Options that go to Megatron-core and vLLM as they are: which may be given, and why the others may not.

A key under `megatron` or `rollout.vllm` is handed to the library. One that would be ignored, that would break what the
trainer relies on, or that would fail hours later is refused by its name before anything is built.

Megatron-core: MEGATRON_WORKS is the list of fields that may be set. Any other field may only repeat the value that is
in effect without it; MEGATRON_REASONS says why for those that documents of other trainers name. vLLM: VLLM_OWNED is the
list of options that may not be set. docs/models.md shows what works, tests/test_options.py runs it.
"""

import dataclasses
import enum
import json
import typing
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from config import UserError
from support.base.read_config import nearest


def by_name(groups: dict[str, str]) -> dict[str, str]:
    """{name: text} of {text: "name name ..."}."""
    return {name: text for text, names in groups.items() for name in names.split()}


def check_type(key: str, value: Any, hint: Any) -> None:
    """Raises UserError where the `value` of `key`, as YAML gives it, is not of the type that the library declares."""
    if isinstance(hint, str) or hint is Any:
        return
    if dataclasses.is_dataclass(hint):  # a section of options, which the library checks itself
        hint = dict[str, Any]
    members = []
    for kind in (hint, *typing.get_args(hint)):
        if isinstance(kind, enum.EnumType):
            members += kind.__members__
    if members and isinstance(value, str):
        if value.upper() not in members:
            near = nearest(value.upper(), members)
            raise UserError(f"{key}={value!r}: no such value; the nearest is {near}")
        return
    settings = {"arbitrary_types_allowed": True, "allow_inf_nan": False, "strict": True}
    adapter = pydantic.TypeAdapter(hint, config=settings)
    try:
        adapter.validate_json(json.dumps(value, default=str))
    except pydantic.ValidationError as error:
        legal = dict.fromkeys(problem["msg"] for problem in error.errors())
        raise UserError(f"{key}={value!r}: {' or '.join(legal).replace('Input should', 'must')}") from None


# ---------------------------------------------------------------- Megatron-core

# Settled by another key or by the model: refused whatever the value.
MEGATRON_OWNED = {
    "tensor_model_parallel_size": "use parallel.tp",
    "sequence_parallel": "use parallel.sp",
    "pipeline_model_parallel_size": "use parallel.pp",
    "virtual_pipeline_model_parallel_size": "use parallel.vpp",
    "context_parallel_size": "use parallel.cp",
    "expert_model_parallel_size": "use parallel.ep",
    "expert_tensor_parallel_size": "use parallel.etp",
    "calculate_per_token_loss": "the loss is exact only with true",
    "moe_enable_routing_replay": "use algo.replay_routes",
    "use_te_activation_func": "the slot holds layers.swiglu, unless megatron.bias_activation_fusion=true",
    "moe_router_load_balancing_type": "only aux_loss, whose weight is megatron.moe_aux_loss_coeff",
}
MEGATRON_OWNED |= {
    name: f"use train.{name}" for name in ("lr", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad")
}
MEGATRON_OWNED |= by_name(
    {
        "use model.dtype": "params_dtype pipeline_dtype bf16 enable_autocast autocast_dtype",
        "use model.dtype, which is bf16 or fp32": "fp16",
        "the learning rate of all weights is train.lr, after train.warmup_steps": "min_lr decoupled_lr "
        "decoupled_min_lr",
        "it follows from parallel.*": "variable_seq_lengths overlap_p2p_comm batch_p2p_comm "
        "overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage",
        "every pipeline stage gets as many layers, see parallel.pp": "num_layers_in_first_pipeline_stage "
        "num_layers_in_last_pipeline_stage pipeline_model_parallel_layout account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split",
        "it comes from config.json of model.path": "num_layers hidden_size ffn_hidden_size num_attention_heads "
        "num_query_groups kv_channels normalization layernorm_epsilon gated_linear_unit activation_func "
        "add_bias_linear add_qkv_bias qk_layernorm num_moe_experts moe_ffn_hidden_size moe_router_topk "
        "moe_router_pre_softmax moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq "
        "window_size",
        "the weights come from model.path": "init_method output_layer_init_method init_method_std "
        "embedding_init_method embedding_init_method_std init_model_with_meta_device use_cpu_initialization",
        "it is a function, which no file of settings can hold": "timers finalize_model_grads_func grad_scale_func "
        "no_sync_func grad_sync_func param_sync_func _cpu_offloading_context",
    }
)

# Why fields that other trainers' documents name are refused, but for the value that is in effect without them.
MEGATRON_REASONS = by_name(
    {
        "checkpoints and exports read the state of Megatron's distributed optimizer": "use_distributed_optimizer",
        "Megatron's distributed optimizer knows Adam alone": "optimizer",
        "Megatron's distributed optimizer knows AdamW alone": "decoupled_weight_decay",
        "bf16 and fp32 need no loss scale: the gradients would be divided by one that the loss was never multiplied "
        "with": "loss_scale",
        "a loss or gradient that is NaN or inf skips the update, see train.max_skipped": "check_for_nan_in_grad",
        "gradients are summed and divided once by the number of tokens": "average_in_collective",
        "checkpoints and the weight push read Megatron's own buffers, not those of FSDP": "use_megatron_fsdp",
        "activations are offloaded by Transformer Engine or on CUDA streams, neither of which was tried here; use "
        "megatron.recompute_granularity": "cpu_offloading fine_grained_activation_offloading",
        "vLLM would sample from another model than the one that is trained": "multi_latent_attention mtp_num_layers "
        "moe_router_score_function moe_router_enable_expert_bias moe_router_topk_scaling_factor",
        "vLLM drops no value and adds no noise, so log-probs would differ": "hidden_dropout attention_dropout "
        "moe_expert_capacity_factor moe_router_force_load_balancing",
        "Megatron-core 0.16 scales it by 1 / (tp · cp), so that training would depend on the layout; use "
        "megatron.moe_aux_loss_coeff": "moe_z_loss_coeff",
        "experts on other ranks may hold another number of tokens; use alltoall": "moe_token_dispatcher_type",
        "use megatron.moe_token_dispatcher_type=flex": "moe_enable_deepep",
        "needs the package grouped_gemm; torch's grouped_mm is used without it": "moe_use_legacy_grouped_gemm",
        "needs Transformer Engine, which this trainer does without": "moe_permute_fusion moe_router_fusion "
        "moe_shared_expert_overlap apply_rope_fusion gradient_accumulation_fusion tp_comm_overlap transformer_impl",
        "fp8 and fp4 need Transformer Engine; model.dtype is bf16 or fp32": "fp8 fp8_recipe fp8_param_gather fp4",
        "attention is torch's, on packed rows (support/model/attention.py)": "attention_backend masked_softmax_fusion",
        "the norm is torch's rms_norm in model.dtype (support/model/layers.py)": "persist_layer_norm",
        "log-probs come from token_logprobs (megatron_bridge.py)": "cross_entropy_loss_fusion",
        "CUDA graphs need rows of one length": "enable_cuda_graph cuda_graph_impl",
    }
)

# The fields that may be set: the named test runs them and finds the same losses and gradients as without them.
MEGATRON_WORKS = by_name(
    {
        "tests/test_layouts.py": "recompute_granularity recompute_method recompute_num_layers overlap_grad_reduce "
        "overlap_param_gather moe_aux_loss_coeff adam_eps",
        "tests/test_options.py": "recompute_modules moe_layer_recompute moe_router_dtype moe_grouped_gemm "
        "bias_activation_fusion bias_dropout_fusion clone_scatter_output_in_embedding deallocate_pipeline_outputs "
        "batch_p2p_sync deterministic_mode grad_reduce_in_fp32 bucket_size pad_buckets_for_high_nccl_busbw "
        "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
        "use_precision_aware_optimizer disable_bf16_reduced_precision_matmul",
        "not tried: needs DeepEP on GPUs": "moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms",
    }
)

# Narrower than what Megatron declares.
MEGATRON_TYPES = {
    "adam_eps": Annotated[float, Field(ge=0)],
    "bucket_size": Annotated[int, Field(ge=1)] | None,
    "moe_aux_loss_coeff": Annotated[float, Field(ge=0)],
    "optimizer_offload_fraction": Annotated[float, Field(gt=0, le=1)],
    "recompute_num_layers": Annotated[int, Field(ge=1)] | None,
    # Those that Megatron-core recomputes without Transformer Engine.
    "recompute_modules": list[Literal["core_attn", "mlp", "moe", "shared_experts"]],
}

# Values in effect that are not Megatron's defaults.
IN_EFFECT = {
    "use_distributed_optimizer": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}

# Without effect unless the other option has this value.
OFFLOADED = ("optimizer_cpu_offload", True)
FLEX = ("moe_token_dispatcher_type", "flex")  # may be set too; refused where DeepEP is missing: check_model
MEGATRON_NEEDS = {
    "recompute_method": ("recompute_granularity", "full"),
    "recompute_num_layers": ("recompute_granularity", "full"),
    "recompute_modules": ("recompute_granularity", "selective"),
    "use_precision_aware_optimizer": OFFLOADED,
    "optimizer_offload_fraction": OFFLOADED,
    "overlap_cpu_optimizer_d2h_h2d": OFFLOADED,
    "pin_cpu_grads": OFFLOADED,
}
MEGATRON_NEEDS |= dict.fromkeys(("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"), FLEX)


def check_megatron(options: dict[str, Any], classes: tuple[type, ...], dtype: str) -> None:
    """Check that `options` are fields of Megatron's config `classes` that do what they say here.

    `dtype`: model.dtype. Raises UserError.
    """
    fields = {field.name: field for cls in classes for field in dataclasses.fields(cls)}
    for name, value in options.items():
        key = f"megatron.{name}"
        if name in MEGATRON_OWNED:
            raise UserError(f"{key}: {MEGATRON_OWNED[name]}")
        if name not in fields:
            near = nearest(name, [*fields])
            raise UserError(f"unknown key '{key}'; the nearest field of Megatron-core is 'megatron.{near}'")
        default = in_effect(fields[name])
        if name in MEGATRON_WORKS or (name, value) == FLEX:
            check_type(key, value, MEGATRON_TYPES.get(name, fields[name].type))
            other, needed = MEGATRON_NEEDS.get(name, (name, value))
            if value != default and options.get(other) != needed:
                raise UserError(f"{key}={value!r} has no effect without megatron.{other}={needed!r}")
        elif value != default or isinstance(value, bool) != isinstance(default, bool):
            reason = MEGATRON_REASONS.get(name, "not tried with this trainer")
            error = f"{key}={value!r}: {reason}; legal is {default!r}, as without this key"
            if name not in MEGATRON_REASONS:
                error += f". Fields that may be set: {', '.join(sorted(MEGATRON_WORKS))}"
            raise UserError(error)
    if options.get("optimizer_cpu_offload") and dtype == "fp32":
        raise UserError(
            "megatron.optimizer_cpu_offload=True: Megatron-core 0.16 cannot offload the optimizer of fp32 weights; use "
            "model.dtype=bf16"
        )


def in_effect(field: dataclasses.Field) -> Any:
    """The value of a field of Megatron's configuration that nobody set."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return IN_EFFECT.get(field.name, default)


# ---------------------------------------------------------------- vLLM

# Options of vLLM that Engine sets or relies on: refused whatever the value.
VLLM_OWNED = {
    "dtype": "use model.dtype",
    "seed": "use seed",
    "tensor_parallel_size": "use rollout.tp",
    "gpu_memory_utilization": "use rollout.gpu_memory_utilization",
    "max_model_len": "use data.max_prompt_tokens, rollout.max_new_tokens and eval.max_new_tokens, whose sum it is",
    "logprobs_mode": "the log-probs that training starts from are those after rollout.temperature",
}
VLLM_OWNED |= by_name(
    {
        "use algo.replay_routes": "enable_return_routed_experts aux_output_config",
        "use model.path": "model model_weights tokenizer tokenizer_mode hf_config_path config_format revision "
        "code_revision tokenizer_revision hf_token hf_overrides model_class_overrides",
        "weights are read from safetensors and pushed by the trainer": "load_format model_loader_extra_config "
        "pt_load_map_location weight_transfer_config ignore_patterns",
        "code beside the weights is not run, by the trainer neither": "trust_remote_code",
        "vLLM runs inside the ranks of torchrun (external_launcher)": "distributed_executor_backend worker_cls "
        "worker_extension_cls scheduler_cls ray_workers_use_nsight device_ids nnodes node_rank master_addr "
        "master_port distributed_timeout_seconds _api_process_count _api_process_rank enable_fault_tolerance "
        "fault_tolerance_config",
        "an engine spans rollout.tp ranks and no others": "pipeline_parallel_size data_parallel_size "
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb data_parallel_backend prefill_context_parallel_size "
        "decode_context_parallel_size enable_elastic_ep elastic_ep_max_dp_size",
        "a push finds each expert where it was at the start": "enable_eplb eplb_config",
        "vLLM's tokenizer says which token ends an answer": "skip_tokenizer_init tokens_only",
        "an answer ends as the model's own generation_config says; use rollout.temperature, top_p, top_k": (
            "generation_config override_generation_config"
        ),
        "answers would come from another distribution than the trainer's": "logits_processors "
        "quantization_config allow_deprecated_quantization watermark_config disable_sliding_window "
        "structured_outputs_config diffusion_config",
        "the model is sampled from as it is, without a draft model": "speculative_config spec_method spec_model "
        "spec_tokens",
        "there is no adapter to load": "enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras "
        "max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
        "vLLM writes answers here": "runner convert pooler_config",
        "all prompts of a step wait in vLLM's queue at once": "max_num_queued_reqs max_num_queued_tokens",
        "a push forgets the prefixes of this engine only": "kv_transfer_config kv_events_config "
        "kv_offloading_size kv_offloading_backend ec_transfer_config",
    }
)


def check_vllm(options: dict[str, Any]) -> None:
    """Check that `options` may go to vLLM, and have the types that it declares. Raises UserError."""
    for name in options:
        if name in VLLM_OWNED:
            raise UserError(f"rollout.vllm.{name}: {VLLM_OWNED[name]}")
    if options.get("quantization") not in (None, "fp8"):
        raise UserError(
            f"rollout.vllm.quantization={options['quantization']!r}: a push is quantised as it is loaded; legal is fp8"
        )
    if not options:
        return
    from support.engine.vllm_process import engine_options  # only where it is used: importing vLLM takes seconds

    types = engine_options()
    for name, value in options.items():
        if name not in types:
            near = nearest(name, [*types])
            raise UserError(f"unknown key 'rollout.vllm.{name}'; the nearest option of vLLM is 'rollout.vllm.{near}'")
        check_type(f"rollout.vllm.{name}", value, types[name])
