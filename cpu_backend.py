"""Makes Megatron-core run on a machine without a GPU, over gloo.

Megatron-core asks torch.cuda for the current device, for streams and for the random state, and writes device="cuda"
when it allocates small tensors. `install()` answers those questions for the CPU. Nothing here changes what is computed,
and nothing is touched where a GPU is present. Call it once, before `megatron` is imported.
"""

import contextlib
import functools

import torch


class _NoStream:
    """Stands in for torch.cuda.Stream and torch.cuda.Event: the CPU runs in program order, so waiting is a no-op."""

    def __init__(self, *args, **kwargs):
        pass

    def _return_self(self, *args, **kwargs):
        return self

    wait_stream = wait_event = record_event = record = synchronize = wait = _return_self


def _cpu_for_cuda(factory):
    """Wrap a tensor factory such as torch.zeros so that device="cuda" means the CPU."""

    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return wrapped


def install() -> None:
    """Patch torch.cuda and three spots of Megatron-core 0.16. Raises RuntimeError where a GPU is present."""
    if torch.cuda.is_available():
        raise RuntimeError("cpu_backend.install() is for machines without a GPU")
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = lambda *args: _NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.FloatTensor, cuda.HalfTensor, cuda.BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    cuda.is_initialized = lambda: False
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    for name in ("zeros", "ones", "empty", "full", "tensor", "empty_like", "zeros_like"):
        setattr(torch, name, _cpu_for_cuda(getattr(torch, name)))

    # The optimizers recognise what they can shard by this string.
    type_of = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **kwargs: (
        type_of(self, *args, **kwargs) if args or kwargs else type_of(self).replace("torch.", "torch.cuda.")
    )

    import megatron.core.tensor_parallel.random as mcore_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    mcore_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 defines it only where Transformer Engine is installed
        moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
