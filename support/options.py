"""Options that go to Megatron-core and vLLM as they are: which may be given, and why the others may not.

A key under `megatron` or `rollout.vllm` is handed to the library. One that would be ignored, that would break what the
trainer relies on, or that would fail hours later is refused by its name before anything is built. docs/models.md shows
what works; tests/test_options.py runs it, starts the script with the rest, and sees that every field of the installed
Megatron-core is in one of the tables below.
"""

import dataclasses
import enum
import json
import typing
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from config import UserError
from support.read_config import nearest


def by_name(groups: dict[str, str]) -> dict[str, str]:
    """{name: text} of {text: "name name ..."}."""
    return {name: text for text, names in groups.items() for name in names.split()}


def check_type(key: str, value: Any, hint: Any) -> None:
    """Raises UserError where the `value` of `key`, as YAML gives it, is not of the type that the library declares."""
    if isinstance(hint, str) or hint is Any:
        return
    if dataclasses.is_dataclass(hint):  # a section of options, which the library checks itself
        hint = dict[str, Any]
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, enum.EnumType)]
    members = [name for kind in kinds for name in kind.__members__]
    if members and isinstance(value, str):
        if value.upper() not in members:
            near = nearest(value.upper(), members)
            raise UserError(f"{key}={value!r}: no such value; the nearest is {near}")
        return
    settings = {"arbitrary_types_allowed": True, "allow_inf_nan": False, "strict": True}
    try:
        pydantic.TypeAdapter(hint, config=settings).validate_json(json.dumps(value, default=str))
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
    **{name: f"use train.{name}" for name in ("lr", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad")},
    "calculate_per_token_loss": "the loss is exact only with true",
    "moe_enable_routing_replay": "use algo.replay_routes",
    "use_te_activation_func": "the slot holds swiglu of support/layers.py, unless megatron.bias_activation_fusion=true",
    "moe_router_load_balancing_type": "only aux_loss, whose weight is megatron.moe_aux_loss_coeff",
    **by_name(
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
    ),
}

# Refused, but for the value that is in effect without it.
MEGATRON_REFUSED = by_name(
    {
        "checkpoints and exports read the state of Megatron's distributed optimizer": "use_distributed_optimizer",
        "Megatron's distributed optimizer knows Adam alone": "optimizer sgd_momentum muon_momentum muon_split_qkv "
        "muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode "
        "muon_extra_scale_factor",
        "Megatron's distributed optimizer knows AdamW alone": "decoupled_weight_decay",
        "train.weight_decay is that of every weight": "apply_wd_to_qk_layernorm",
        "bf16 and fp32 need no loss scale: the gradients would be divided by one that the loss was never multiplied "
        "with": "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "optimizer state is fp32; lower precision needs Transformer Engine": "main_grads_dtype main_params_dtype "
        "exp_avg_dtype exp_avg_sq_dtype store_param_remainders",
        "Megatron-core 0.16 reads it nowhere": "use_torch_optimizer_for_cpu_offload pin_cpu_params moe_extended_tp "
        "async_tensor_model_parallel_allreduce moe_token_dropping",
        "the metrics show grad_norm, and nobody reads this": "log_num_zeros_in_grad moe_per_layer_logging "
        "log_max_attention_logit config_logger_dir barrier_with_L1_time test_mode",
        "a loss or gradient that is NaN or inf skips the update, see train.max_skipped": "check_for_nan_in_grad "
        "check_for_large_grads",
        "gradients are summed and divided once by the number of tokens": "average_in_collective "
        "gradient_reduce_div_fusion",
        "all replicas share one distributed optimizer": "num_distributed_optimizer_instances "
        "overlap_param_gather_with_optimizer_step align_param_gather",
        "checkpoints and the weight push read Megatron's own buffers, not those of FSDP": "use_megatron_fsdp "
        "use_custom_fsdp data_parallel_sharding_strategy suggested_communication_unit_size preserve_fp32_weights "
        "fsdp_double_buffer outer_dp_sharding_strategy fsdp_manual_registration",
        "NCCL's user buffers were never tried here": "nccl_ub disable_symmetric_registration",
        "it was never tried with rows of different lengths": "reduce_scatter_with_fp32_accumulation "
        "distribute_saved_activations num_microbatches_with_partial_activation_checkpoints "
        "use_ring_exchange_p2p pipeline_model_parallel_comm_backend defer_embedding_wgrad_compute "
        "wgrad_deferral_limit",
        "activations are offloaded by Transformer Engine or on CUDA streams, neither of which was tried here; use "
        "megatron.recompute_granularity": "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations "
        "cpu_offloading_weights cpu_offloading_double_buffering fine_grained_activation_offloading offload_modules "
        "min_offloaded_tensor_size",
        "vLLM would sample from another model than the one that is trained": "softmax_scale softmax_type "
        "rotary_interleaved window_attn_skip_freq qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold "
        "attention_output_gate multi_latent_attention no_rope_freq experimental_attention_variant "
        "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff "
        "dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim linear_key_head_dim "
        "linear_value_head_dim linear_num_key_heads linear_num_value_heads apply_residual_connection_post_layernorm "
        "layernorm_zero_centered_gamma glu_linear_offset activation_func_clamp_value mtp_num_layers "
        "mtp_loss_scaling_factor mtp_standalone mrope_section is_hybrid_model mamba_state_dim mamba_head_dim "
        "mamba_num_groups mamba_num_heads use_mamba_mem_eff_path heterogeneous_block_specs "
        "hetereogenous_dist_checkpoint moe_latent_size moe_apply_probs_on_input moe_router_num_groups "
        "moe_router_group_topk moe_router_topk_limited_devices moe_router_topk_scaling_factor "
        "moe_router_score_function moe_router_enable_expert_bias moe_router_bias_update_rate",
        "vLLM drops no value and adds no noise, so log-probs would differ": "hidden_dropout attention_dropout "
        "moe_input_jitter_eps moe_router_force_load_balancing moe_expert_capacity_factor "
        "moe_pad_expert_input_to_capacity moe_token_drop_policy",
        "Megatron-core 0.16 scales it by 1 / (tp · cp), so that training would depend on the layout; use "
        "megatron.moe_aux_loss_coeff": "moe_z_loss_coeff",
        "experts on other ranks may hold another number of tokens; use alltoall": "moe_token_dispatcher_type",
        "use megatron.moe_token_dispatcher_type=flex": "moe_enable_deepep",
        "needs the package grouped_gemm; torch's grouped_mm is used without it": "moe_use_legacy_grouped_gemm",
        "needs Transformer Engine, which this trainer does without": "moe_permute_fusion moe_router_fusion "
        "use_te_rng_tracker apply_rope_fusion fused_single_qkv_rope "
        "gradient_accumulation_fusion tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag "
        "tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs "
        "tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend "
        "symmetric_ar_type overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release "
        "moe_shared_expert_overlap transformer_impl",
        "fp8 and fp4 need Transformer Engine; model.dtype is bf16 or fp32": "fp8 fp8_recipe fp8_param "
        "fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
        "fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16 "
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen use_kitchen_attention "
        "kitchen_attention_backend fp4 fp4_recipe fp4_param fp4_quantizer_factory activation_func_fp8_input_store "
        "quant_recipe moe_router_padding_for_quantization moe_router_padding_for_fp8 fp8_param_gather "
        "keep_fp8_transpose_cache reuse_grad_buf_for_mxfp8_param_ag disable_parameter_transpose_cache",
        "attention is torch's, over packed rows (support/attention.py)": "attention_backend "
        "apply_query_key_layer_scaling attention_softmax_in_fp32 masked_softmax_fusion cp_comm_type "
        "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel flash_decode",
        "the norm is torch's rms_norm in model.dtype (support/layers.py)": "persist_layer_norm "
        "memory_efficient_layer_norm fp32_residual_connection",
        "log-probs come from token_logprobs (megatron_bridge.py)": "cross_entropy_loss_fusion "
        "cross_entropy_fusion_impl",
        "it is for another activation function": "use_fused_weighted_squared_relu",
        "CUDA graphs need rows of one length": "enable_cuda_graph external_cuda_graph cuda_graph_impl "
        "cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps",
        "it is for inference, which is vLLM's part": "inference_rng_tracker inference_sampling_seed "
        "use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill "
        "batch_invariant_mode",
        "Megatron would count sharded weights once in the gradient norm": "perform_initialization",
    }
)

# What tests/test_options.py (or the test that is named) runs: the same losses and gradients as without it.
MEGATRON_WORKS = by_name(
    {
        "tests/test_layouts.py": "recompute_granularity recompute_method recompute_num_layers overlap_grad_reduce "
        "overlap_param_gather moe_aux_loss_coeff adam_eps",
        "tests/test_options.py": "recompute_modules moe_layer_recompute moe_router_dtype moe_grouped_gemm "
        "bias_activation_fusion bias_dropout_fusion clone_scatter_output_in_embedding deallocate_pipeline_outputs "
        "batch_p2p_sync "
        "deterministic_mode grad_reduce_in_fp32 bucket_size pad_buckets_for_high_nccl_busbw optimizer_cpu_offload "
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads use_precision_aware_optimizer "
        "disable_bf16_reduced_precision_matmul",
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
OFFLOADED, FLEX = ("optimizer_cpu_offload", True), ("moe_token_dispatcher_type", "flex")
MEGATRON_NEEDS = {
    "recompute_method": ("recompute_granularity", "full"),
    "recompute_num_layers": ("recompute_granularity", "full"),
    "recompute_modules": ("recompute_granularity", "selective"),
    **dict.fromkeys(("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads"), OFFLOADED),
    "use_precision_aware_optimizer": OFFLOADED,
    **dict.fromkeys(("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"), FLEX),
}


def check_megatron(options: dict[str, Any], classes: tuple[type, ...], dtype: str) -> None:
    """See that `options` are fields of Megatron's config `classes` that do what they say here. Raises UserError.

    `dtype`: model.dtype.
    """
    fields = {field.name: field for cls in classes for field in dataclasses.fields(cls)}
    for name, value in options.items():
        key = f"megatron.{name}"
        if name in MEGATRON_OWNED:
            raise UserError(f"{key}: {MEGATRON_OWNED[name]}")
        if name not in fields:
            near = nearest(name, [*fields])
            raise UserError(f"unknown key '{key}'; the nearest field of Megatron-core is 'megatron.{near}'")
        if name in MEGATRON_REFUSED and (name, value) != FLEX:  # flex is refused where DeepEP is missing: check_model
            legal = in_effect(fields[name])
            if value != legal or isinstance(value, bool) != isinstance(legal, bool):
                raise UserError(f"{key}={value!r}: {MEGATRON_REFUSED[name]}; legal is {legal!r}, as without this key")
            continue
        if name not in MEGATRON_WORKS and (name, value) != FLEX:
            raise UserError(
                f"{key}: nobody has tried this field of a newer Megatron-core here; legal are "
                f"{', '.join(sorted(MEGATRON_WORKS))}"
            )
        check_type(key, value, MEGATRON_TYPES.get(name, fields[name].type))
        other, needed = MEGATRON_NEEDS.get(name, (name, value))
        if value != in_effect(fields[name]) and options.get(other) != needed:
            raise UserError(f"{key}={value!r} has no effect without megatron.{other}={needed!r}")
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
    **by_name(
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
    ),
}


def check_vllm(options: dict[str, Any]) -> None:
    """See that `options` may go to vLLM, and have the types that it declares. Raises UserError."""
    for name in options:
        if name in VLLM_OWNED:
            raise UserError(f"rollout.vllm.{name}: {VLLM_OWNED[name]}")
    if options.get("quantization") not in (None, "fp8"):
        raise UserError(
            f"rollout.vllm.quantization={options['quantization']!r}: a push is quantised as it is loaded; legal is fp8"
        )
    if not options:
        return
    from support.vllm_process import engine_options  # only where it is used: importing vLLM takes seconds

    types = engine_options()
    for name, value in options.items():
        if name not in types:
            near = nearest(name, [*types])
            raise UserError(f"unknown key 'rollout.vllm.{name}'; the nearest option of vLLM is 'rollout.vllm.{near}'")
        check_type(f"rollout.vllm.{name}", value, types[name])
