"""What vLLM 0.32 needs on the CPU to run beside a trainer: names of its own in shared memory, and packed weights that
take up a push. Nothing here is called where there is a GPU."""

import uuid

import torch

from support import ranks
from support.push_check import digest


def prepare() -> str:
    """What has to be done before vLLM starts; returns the prefix of its files in /dev/shm."""
    note_packed_weights()
    return name_shared_memory_after_this_run()


def name_shared_memory_after_this_run() -> str:
    """Make vLLM's CPU shared memory carry a name of this run only; returns the prefix of its files in /dev/shm.

    vLLM 0.32 gives it the same name in every external-launcher run, so that a second run, or a dead one, breaks the
    next. All ranks call this together.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as shm

    prefix, group_name = f"train-grpo-{ranks.gather(uuid.uuid4().hex)[0]}", shm.make_group_name
    shm.make_group_name = staticmethod(lambda communicator: prefix + group_name(communicator).replace("/", ""))
    return prefix


def note_packed_weights() -> None:
    """Make vLLM's CPU layers keep, as `packed`, digests {name: (unordered, ordered)} of the weights they pack.

    vLLM 0.32 packs them for its kernels as they are loaded and drops what it packed, so a push can be seen there only.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    def note(layer: torch.nn.Module, *names: str) -> None:
        weights = {name: getattr(layer, name) for name in names if getattr(layer, name, None) is not None}
        dtype = weights[names[0]].dtype  # of a bias too, which some kernels want in fp32
        layer.packed = {
            name: (digest(weight.to(dtype)), digest(weight.to(dtype), ordered=True))
            for name, weight in weights.items()
            if not weight.is_meta
        }

    pack, pack_experts = utils.dispatch_cpu_unquantized_gemm, Experts.process_weights_after_loading

    def noted_pack(layer: torch.nn.Module, remove_weight: bool) -> None:
        note(layer, "weight", "bias")
        pack(layer, remove_weight)

    def noted_pack_experts(self, layer: torch.nn.Module) -> None:
        note(layer, "w13_weight", "w2_weight")
        pack_experts(self, layer)

    utils.dispatch_cpu_unquantized_gemm, Experts.process_weights_after_loading = noted_pack, noted_pack_experts


def unpack_experts(model: torch.nn.Module) -> None:
    """On the CPU vLLM packs experts once; a reload packs them anew only where it finds no kernel (vLLM 0.32)."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_lm_head(model: torch.nn.Module) -> None:
    """On the CPU vLLM keeps a packed copy of a tied output layer, which a reload leaves stale (vLLM 0.32)."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(head, "quant_method", None) is not None:
        head.quant_method.process_weights_after_loading(head)
