"""Makes Megatron-core run over gloo, without a GPU: call `install()` once, before `megatron` is imported."""

import contextlib
import functools
import importlib
import os
import types
import warnings
from collections.abc import Collection

import torch

FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "empty_like", "zeros_like")
# The modules of Megatron-core that write device="cuda" or wait for streams.
MODULES = (
    "pipeline_parallel.schedules", "optimizer.optimizer", "optimizer.clip_grads", "optimizer.grad_scaler", "utils",
    "optimizer.cpu_offloading.hybrid_optimizer", "distributed.param_and_grad_buffer", "transformer.moe.moe_utils",
    "transformer.moe.token_dispatcher",
)  # fmt: skip


def install():
    """Patch torch.cuda and a few spots of Megatron-core, on a machine without a GPU."""
    # Else Megatron's small functions are compiled in C++ at every start, which takes longer than a run of the demo.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    replace_slow_products()
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = cuda.current_stream = _NoStream
    cuda.stream = contextlib.nullcontext
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = functools.partialmethod(_type, torch.Tensor.type)

    # Only now: importing Megatron-core already uses what is patched above.
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    for name in MODULES:
        importlib.import_module(f"megatron.core.{name}").torch = _TorchWithoutCuda("torch")
    mcore_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    mappings._gather_along_first_dim = functools.partial(_gather_any, mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = functools.partial(
        _reduce_scatter_any, mappings._reduce_scatter_along_first_dim
    )
    param_and_grad_buffer.dist_reduce_scatter_func = _reduce_whole
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _offloaded_groups
    token_dispatcher.maybe_move_tensor_to_cpu = _stay


# ---------------------------------------------------------------- stand-ins for torch


class _NoStream:
    """Stands in for torch.cuda.Stream and torch.cuda.Event: the CPU runs in program order, so waiting is a no-op."""

    def __init__(self, *args, **kwargs):
        pass

    def _return_self(self, *args, **kwargs):
        return self

    wait_stream = wait_event = record_event = record = synchronize = wait = _return_self


class _CudaWithoutGpu(types.ModuleType):
    """torch.cuda, with streams that vLLM cannot take away: importing its CPU worker puts other stand-ins there."""

    Stream = Event = current_stream = _NoStream
    stream = contextlib.nullcontext

    def __getattr__(self, name):
        return getattr(torch.cuda, name)


class _TorchWithoutCuda(types.ModuleType):
    """The torch module, except that device="cuda" in a tensor factory means the CPU.

    Given to Megatron's modules alone: patching torch itself would break what others do with these factories, such as
    transformers' loading under a meta device.
    """

    cuda = _CudaWithoutGpu("torch.cuda")

    def __getattr__(self, name):
        value = getattr(torch, name)
        return functools.partial(_make_on_cpu, value) if name in FACTORIES else value


def _make_on_cpu(factory, *args, device=None, **options):
    if str(device).startswith("cuda"):
        device = "cpu"
    return factory(*args, device=device, **options)


def _type(tensor, type_of, *args, **kwargs):
    """torch.Tensor.type, but the name of a tensor's type says "cuda": Megatron's optimizers shard by this name."""
    result = type_of(tensor, *args, **kwargs)
    return result if args or kwargs else result.replace("torch.", "torch.cuda.")


# ---------------------------------------------------------------- stand-ins for functions of Megatron-core


def _padded(x, length):
    return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])


def _gather_any(gather, x, group, output_split_sizes=None, use_global_buffer=False):
    """Megatron's gather of parts of different lengths, which gloo refuses: pad, then cut."""
    if output_split_sizes is None:
        return gather(x, group, None, use_global_buffer)
    width = max(output_split_sizes)
    parts = gather(_padded(x, width), group).split(max(width, 1))
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=False)])


def _reduce_scatter_any(reduce_scatter, x, group, input_split_sizes=None, use_global_buffer=False):
    """Megatron's reduce-scatter of parts of different lengths, as `_gather_any`."""
    if input_split_sizes is None:
        return reduce_scatter(x, group, None, use_global_buffer)
    width = max(input_split_sizes)
    parts = torch.cat([_padded(part, width) for part in x.split(input_split_sizes)])
    return reduce_scatter(parts, group)[: input_split_sizes[group.rank()]]


def _reduce_whole(part, whole, **options):
    """Reduce-scatter in place, as this rank's part is a view of the gradients. gloo's own would copy them all."""
    return torch.distributed.all_reduce(whole, **options)


def _stay(tensor, as_numpy=False, record_stream=False):
    """Stands in for a move to the CPU, where the tensor is already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _offloaded_groups(self, fraction):
    """HybridDeviceOptimizer's split of its weights, where the "GPU" is the CPU too: a copy stands for the host's.

    Returns (groups on the host, groups on the GPU, weight → copy, copy → weight, weight → fp32 copy), as Megatron.
    """
    room = fraction * sum(weight.numel() for group in self.param_groups for weight in group["params"])
    host_groups = []
    gpu_groups = []
    weight_of = {}
    fp32_copies = {}
    for group in self.param_groups:
        for weight in group["params"]:
            offloaded = room > 0
            stepped = weight
            if offloaded:
                stepped = weight.detach().clone()
                room -= weight.numel()
            if self.param_update_in_fp32 and weight.dtype != torch.float32:
                stepped = fp32_copies[weight] = stepped.detach().clone().float()

            alone = {**group, "params": [stepped]}
            if offloaded:
                weight_of[stepped] = weight
                host_groups.append(alone)
            else:
                gpu_groups.append(alone)
    copies = {weight: copy for copy, weight in weight_of.items()}
    return host_groups, gpu_groups, copies, weight_of, fp32_copies


# ---------------------------------------------------------------- matrix products in bf16 and fp16

# The operators that all matrix products of a step end in: linear layers, experts, the head, adapters, attention.
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


@functools.cache  # once a process, and for as long as it lives
def replace_slow_products() -> torch.library.Library | None:
    """Compute products of bf16 and fp16 tensors in fp32 if this CPU has no units for the type."""
    slow = [dtype for dtype in (torch.bfloat16, torch.float16) if not has_units(dtype)]
    return compute_products_in_fp32(slow) if slow else None


def has_units(dtype):
    """Whether torch has a fast kernel for bf16 or fp16 products on this CPU (AVX-512, AMX, Arm); no without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return False
    mkldnn = torch.ops.mkldnn
    asks = mkldnn._is_mkldnn_bf16_supported if dtype is torch.bfloat16 else mkldnn._is_mkldnn_fp16_supported
    return asks()


def compute_products_in_fp32(dtypes: Collection[torch.dtype]) -> torch.library.Library:
    """Replace torch's CPU kernels of matrix products: tensors in `dtypes` are multiplied in fp32 and rounded once.

    The kernels stay as long as the returned object does. The result is at least as exact as that of a kernel for the
    type, but its bits differ. Other types go to torch's own kernels.
    """
    kernels = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns that a kernel is replaced
        for name in MATRIX_PRODUCTS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            kernels.impl(name, functools.partial(_widened, kernel, dtypes), "CPU", with_keyset=True)
    return kernels


def _widened(kernel, dtypes, keyset, first, *others, **options):
    """The result of an operator's `kernel`, which gets tensors in `dtypes` as fp32."""
    if first.dtype not in dtypes:
        return kernel.call_boxed(keyset, first, *others, **options)
    wide = [x.float() if torch.is_tensor(x) and x.dtype in dtypes else x for x in (first, *others)]
    return kernel.call_boxed(keyset, *wide, **options).to(first.dtype)
