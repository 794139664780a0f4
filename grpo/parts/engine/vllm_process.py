"""Environment variables that vLLM reads, set before it is imported, and the options of its engine."""

import dataclasses
import math
import os

import torch

from grpo.parts.base.hf_folder import head_dim, read_config


def set_environment(exact=False, dtype="bf16"):
    """Set variables that vLLM, or torch for it, reads at import or at its first allocation.

    `exact` is rollout.exact, `dtype` is model.dtype. A variable that the user has set stays.
    """
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs inside this process
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every rank is bound to the same cores
    }

    if torch.cuda.device_count() == 0:
        defaults["TORCHDYNAMO_DISABLE"] = "1"  # it would compile one small function in C++ at every start
    else:
        # With a seed per prompt the old runner samples one request after the other, the new one samples all at once.
        defaults["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # never used with processed log-probs, but imported
        if exact:
            defaults["VLLM_BATCH_INVARIANT"] = "1"
            # vLLM 0.26 and 0.32 set this workspace themselves from compute capability 9.0 on.
            defaults["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
        if dtype == "fp32":  # vLLM's attention is then Triton's, which would multiply in TF32
            defaults["TRITON_F32_DEFAULT"] = "ieee"

    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def capture_size(batch):
    """The largest batch of which to capture a CUDA graph, so that `batch` requests have one; at most 512."""
    step = 8 if batch <= 256 else 16  # vLLM captures the multiples of these up to the size that it gets
    return min(math.ceil(batch / step) * step, 512)


def most_sequences(batch, tp):
    """vLLM's option that lets `batch` requests run together, at most 512, if its default for this machine is less.

    Each request costs memory as its logits do: with 152,000 tokens 0.6 MB while vLLM sleeps, and 1.8 MB more while it
    samples. Beyond 512 requests vLLM captures no CUDA graph.
    """
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    _, defaults = EngineArgs.get_batch_defaults(tp)
    wanted = min(batch, 512)
    return {"max_num_seqs": wanted} if wanted > defaults[UsageContext.LLM_CLASS] else {}


def cpu_cache(model, dtype, tensor_parallel_size, max_model_len, max_num_seqs=None, **unused):
    """vLLM's option for its KV cache on a CPU, by its other options: room for all sequences at once.

    At most 1 GiB or one sequence: every rank fills it with zeros at its start, which takes a third of a second a GiB.
    """
    if torch.cuda.device_count():
        return {}
    hf = read_config(model)
    heads = max(hf.num_key_value_heads // tensor_parallel_size, 1)
    token = 2 * hf.num_hidden_layers * heads * head_dim(hf) * (4 if dtype == "float32" else 2)
    sequences = max_num_seqs or 256 * tensor_parallel_size  # vLLM's default
    block = 128  # tokens; the last one of a sequence is seldom full
    sequence = (max_model_len // block + 2) * block * token
    return {"kv_cache_memory_bytes": max(min(sequences * sequence, 2**30), sequence)}


def let_segments_grow():
    """Let torch's allocator make expandable segments from now on, unless the user has set it up.

    Rows differ in length, and such segments leave fewer holes. Call it after vLLM has started: docs/dev/field-notes.md
    says why.
    """
    if os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def keeps_weights(model: torch.nn.Module):
    """Whether vLLM on a GPU holds all weights of `model` as a checkpoint has them, so that a push is copied into them.

    vLLM's reload, which quantized weights and experts need, makes each layer anew first: a third of a push's time.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    methods = {type(getattr(module, "quant_method", None)) for module in model.modules()}
    return methods <= {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


def engine_options():
    """Fields of vLLM's EngineArgs and their types. grpo/run/preflight/options.py lists those rollout.vllm may set."""
    set_environment()
    from vllm import EngineArgs

    return {field.name: field.type for field in dataclasses.fields(EngineArgs)}
