"""A CUDA device that is not there: its tensors have real values, which the CPU computes.

A tensor "on the GPU" is a FakeTensor, so torch gives every result the shape, type and device that it would have, and
refuses what CUDA refuses, such as two devices in one operation. A dispatch mode below autograd computes the values.
They belong to storages: views, `.data =` and in-place operations work as they do on a GPU.

Modelled besides: which operations make the host wait (`WAITS`), which host tensors are pinned, and which of them wait
for a copy from the GPU. Not modelled: kernels, streams, the allocator, the speed of anything.
"""

import collections
import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from tests.gpu_rehearsal import flash

REPO = Path(__file__).resolve().parents[2]
WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
BETWEEN = ("/torch/", "/gpu_rehearsal/", "/contextlib.py", "/functools.py", "/_contextlib.py")  # no place of ours


class Waits:
    """`counts` is {(phase, place, kind): number}; a place is "file function", such as "train_grpo.py score".

    `launches` is {(phase, place, operation): number}, of operations that compute on the GPU.
    """

    def __init__(self):
        self.counts: collections.Counter = collections.Counter()
        self.launches: collections.Counter = collections.Counter()
        self.phase: Callable[[], str] = lambda: "start"

    def note(self, kind):
        """The host waits now."""
        self.counts[self.phase(), self.place(), kind] += 1

    def note_launch(self, op):
        """The host starts an operation on the GPU."""
        if not is_view(op) and op._opname not in WITHOUT_KERNEL:
            self.launches[self.phase(), self.place(), op._opname] += 1

    def place(self):
        """The innermost frame that is neither torch's nor the rehearsal's."""
        frame = sys._getframe(1)
        while frame.f_back and any(part in frame.f_code.co_filename for part in BETWEEN):
            frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        name = file.relative_to(REPO) if file.is_relative_to(REPO) and "/.venv" not in str(file) else file.name
        return f"{name} {frame.f_code.co_name}"


aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
WAITS = Waits()
GENERATOR = torch.Generator()  # the GPU's, from which nothing is drawn: random numbers are the host's
METADATA = FakeTensorMode(allow_non_fake_inputs=True)


def is_view(op):
    return any(result.alias_info and not result.alias_info.is_write for result in op._schema.returns)


def on_gpu(x):
    return isinstance(x, FakeTensor)


# ---------------------------------------------------------------- values of storages


VALUES = WeakIdKeyDictionary()  # of a GPU's storage: the storage on the host with its values
PINNED = WeakIdKeyDictionary()  # host storages in pinned memory
IN_FLIGHT = WeakIdKeyDictionary()  # host storages that a copy from the GPU may not have reached; empty after a wait


def value_of(x):
    """The values of a tensor on the GPU, as a view of them on the host; anything else as it is."""
    if not on_gpu(x):
        return x
    values = VALUES[x.untyped_storage()]
    return torch.empty(0, dtype=x.dtype).set_(values, x.storage_offset(), x.size(), x.stride())


def values_of(tree):
    return tree_map(value_of, tree)


def give_values(x, values):
    """Give the new tensor `x` on the GPU its values; a tensor of a known storage has them already."""
    storage = x.untyped_storage()
    if VALUES.get(storage) is not None:
        return x
    if (x.shape, x.dtype) != (values.shape, values.dtype):
        raise RuntimeError(f"rehearsal: {x} on CUDA, {values.shape} {values.dtype} on the CPU")
    same_layout = x.stride() == values.stride() and x.storage_offset() == values.storage_offset()
    if not same_layout or values.untyped_storage().nbytes() != storage.nbytes():
        whole = torch.empty(storage.nbytes() // x.itemsize, dtype=x.dtype)
        values = whole.as_strided(x.size(), x.stride(), x.storage_offset()).copy_(values)
    VALUES[storage] = values.untyped_storage()
    return x


def to_gpu(values):
    """A new tensor on the GPU with these values; what is no tensor as it is."""
    if not isinstance(values, torch.Tensor):
        return values
    with METADATA:
        x = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=CUDA)
    return give_values(x, values)


# ---------------------------------------------------------------- operations


def compute(op, args, kwargs, kernel=None):
    """Any operation without a case of its own: metadata from torch's fake tensors, values by `kernel` (`op` itself)."""
    with METADATA:
        results = op(*args, **kwargs)
    on_host = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
    values = (kernel or op)(*values_of(args), **values_of(kwargs) | on_host)
    for x, value in zip(tree_leaves(results), tree_leaves(values), strict=True):
        if on_gpu(x):
            give_values(x, value)
    return results


def compute_on_host(op, args, kwargs):
    """An operation without a tensor on the GPU."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    if IN_FLIGHT and not is_view(op) and any(IN_FLIGHT.get(x.untyped_storage()) for x in tensors):
        raise RuntimeError(f"rehearsal: {op} on the host uses a copy from the GPU that may not have arrived")
    if op is aten.is_pinned.default:
        return args[0].untyped_storage() in PINNED
    pinned = op is aten._pin_memory.default or kwargs.pop("pin_memory", False)
    result = args[0].clone() if op is aten._pin_memory.default else op(*args, **kwargs)
    if pinned:
        PINNED[result.untyped_storage()] = True
    return result


def note_copy(target_on_gpu, host, other, non_blocking):
    """A copy between GPU and `host` waits unless it is non-blocking and of pinned memory. Where types or layouts differ
    torch copies by way of other memory, which is not pinned."""
    storage = host.untyped_storage()
    direct = host.dtype == other.dtype and host.is_contiguous() and PINNED.get(storage)
    if not (non_blocking and direct):
        WAITS.note("copy to the GPU" if target_on_gpu else "copy from the GPU")
        if not target_on_gpu:
            IN_FLIGHT.clear()
    elif not target_on_gpu:
        IN_FLIGHT[storage] = True


def copy_into(op, args, kwargs):
    """aten.copy_(target, source, non_blocking)."""
    target, source = args[:2]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    value_of(target).copy_(value_of(source))
    if on_gpu(target) != on_gpu(source):
        host, other = (source, target) if on_gpu(target) else (target, source)
        note_copy(on_gpu(target), host, other, non_blocking)
    return target


def copy_to(op, args, kwargs):
    """aten._to_copy(x, dtype, device, non_blocking)."""
    x, device = args[0], torch.device(kwargs.get("device") or CUDA)
    if on_gpu(x) == (device.type == "cuda"):
        return compute(op, args, kwargs)
    values = op(*values_of(args), **kwargs | {"device": torch.device("cpu"), "non_blocking": False})
    non_blocking = kwargs.get("non_blocking", False)
    if not on_gpu(x):
        note_copy(True, x, values, non_blocking)
        return to_gpu(values)
    if non_blocking:  # torch makes the result in pinned memory
        PINNED[values.untyped_storage()] = True
    note_copy(False, values, x, non_blocking)
    return values


def compute_unknown_size(op, args, kwargs):
    """The host has to know the result, or its size, before it can go on."""
    WAITS.note(op._opname)
    IN_FLIGHT.clear()
    return tree_map(to_gpu, op(*values_of(args), **values_of(kwargs)))


def repeat_interleave(op, args, kwargs):
    run = compute if kwargs.get("output_size") is not None else compute_unknown_size
    return run(op, args, kwargs)


def compute_indexed(op, args, kwargs):
    """x[indices] and x[indices] = values. A mask becomes indices, which waits; indices of the host are copied."""
    indices = [index for index in args[1] if index is not None]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    writes = op not in (aten.index.Tensor,)
    if masks and writes and len(args[1]) == 1 and args[2].numel() == 1:  # CUDA has a kernel without indices for this
        masks = False
    elif masks:
        WAITS.note(f"{op._opname} by a mask")
    if not all(map(on_gpu, indices)):
        WAITS.note(f"{op._opname} by an index of the host")
    values = op(*values_of(args), **kwargs)  # in any case: what is mutable is changed
    return args[0] if op._schema.is_mutable else to_gpu(values)


def communicate(op, args, kwargs):
    """A collective: over gloo, in place."""
    results = op(*values_of(args), **kwargs)
    tensors = {key_of(value_of(x)): x for x in tree_leaves(args) if on_gpu(x)}
    return tree_map(lambda x: tensors.get(key_of(x), x) if isinstance(x, torch.Tensor) else x, results)


def key_of(x):
    return x.data_ptr(), tuple(x.shape)


def grouped_mm(op, args, kwargs):
    """Its fake kernel knows bf16 alone, CUDA's others too."""
    return to_gpu(op(*values_of(args), **values_of(kwargs)))


def mm_wider(op, args, kwargs):
    """torch.mm with out_dtype, which CPUs lack."""
    x, y, dtype = values_of(args)
    return to_gpu(x.to(dtype) @ y.to(dtype))


def addmm_wider(op, args, kwargs):
    """torch.addmm with out_dtype, whose `out` is the first argument."""
    x, y, dtype = values_of(args[1:])
    value_of(kwargs["out"]).addmm_(x.to(dtype), y.to(dtype))
    return kwargs["out"]


# Operations with a case of their own → (operation, args, kwargs) → result.
CASES = {
    aten.copy_.default: copy_into,
    aten._to_copy.default: copy_to,
    aten.repeat_interleave.Tensor: repeat_interleave,
    aten._grouped_mm.default: grouped_mm,
    aten.mm.dtype: mm_wider,
    aten.addmm.dtype_out: addmm_wider,
    aten._flash_attention_forward.default: partial(compute, kernel=flash.forward),
    aten._flash_attention_backward.default: partial(compute, kernel=flash.backward),
}
WAITING = (
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim,
    aten.unique_consecutive, aten.equal, aten.bincount,
)  # fmt: skip
CASES |= {operation.default: compute_unknown_size for operation in WAITING}
for indexing in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default):
    CASES[indexing] = compute_indexed


class Gpu(TorchDispatchMode):
    """Every operation of torch comes here."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op is torch.ops.prim.device.default and on_gpu(args[0]):
            return args[0].fake_device
        makes_gpu_tensor = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if not makes_gpu_tensor and not any(map(on_gpu, tree_leaves((args, kwargs)))):
            return compute_on_host(op, args, kwargs)
        WAITS.note_launch(op)
        if op.namespace == "c10d":
            return communicate(op, args, kwargs)
        if op.namespace == "torch_attn":  # varlen_attn's own Python, which calls FlashAttention
            from torch.nn.attention import varlen

            with self:
                return getattr(varlen, op._opname)._init_fn(*args, **kwargs)
        return CASES.get(op, compute)(op, args, kwargs)


# ---------------------------------------------------------------- torch.cuda


class Stream:
    """A stream or an event."""

    def __init__(self, *args, **kwargs):
        self.device, self.cuda_stream = CUDA, 0

    def done(self, *args, **kwargs) -> "Stream":
        return self

    record = record_event = wait = wait_event = wait_stream = done

    def synchronize(self):
        synchronize()


def synchronize(*args):
    WAITS.note("synchronize")
    IN_FLIGHT.clear()


def apply_to_module(module, change, recurse=True):
    """Module._apply of weights, which would exchange FakeTensors as objects and fails where others refer to them."""
    for child in module.children() if recurse else ():
        child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = change(parameter)
        if on_gpu(changed) == on_gpu(parameter):
            parameter.data = changed
        else:
            module._parameters[name] = torch.nn.Parameter(changed, parameter.requires_grad)
            module._parameters[name].__dict__.update(parameter.__dict__)
    return module


def patch_cuda():
    """torch.cuda, as it answers on a machine with a GPU for each of its ranks; each rank sees its own as number 0."""
    answers = {
        "is_available": True, "is_initialized": True, "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "current_device": 0, "set_device": None, "get_device_capability": (9, 0), "_lazy_init": None,
        "get_device_name": "NVIDIA H100 (rehearsed)", "mem_get_info": (70 << 30, 80 << 30),
        "reset_peak_memory_stats": None, "memory_allocated": 0, "max_memory_allocated": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer: answer)

    torch.cuda._lazy_call = lambda call, **kwargs: call()
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = torch.cuda.default_stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = synchronize
    torch.cuda.empty_cache = lambda: WAITS.note("empty_cache")
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None

    torch.cuda.default_generators = (GENERATOR,)
    for module in (torch.cuda, torch.cuda.random):
        module.manual_seed = module.manual_seed_all = lambda seed: GENERATOR.manual_seed(int(seed))
        module.get_rng_state = lambda *args, **kwargs: GENERATOR.get_state()
        module.set_rng_state = lambda state, *args, **kwargs: GENERATOR.set_state(state)


def patch_tensors():
    """What torch computes from tensors without a dispatch."""
    to_list, make_tensor = torch.Tensor.tolist, torch.tensor
    _device._device_constructors()  # it remembers torch's factories by identity, so before one is replaced

    def tensor(data, *args, **kwargs):  # of a list of tensors on the GPU, it reads one after the other
        if isinstance(data, (list, tuple)):
            data = tree_map(lambda x: x.item() if on_gpu(x) else x, data)
        return make_tensor(data, *args, **kwargs)

    torch.tensor = tensor
    torch.Tensor.tolist = FakeTensor.tolist = lambda self: to_list(self.cpu() if on_gpu(self) else self)
    torch.Tensor.record_stream = lambda self, stream: None
    FakeTensor.data_ptr = lambda self: value_of(self).data_ptr()  # torch's is 0
    torch.nn.Module._apply = apply_to_module
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") dispatches its copy then


def install():
    """From here on this process has a GPU. The shim must be loaded."""
    patch_cuda()
    patch_tensors()
    torch.autograd.set_multithreading_enabled(False)  # the engine has no thread for a device that is not there
    Gpu().__enter__()
