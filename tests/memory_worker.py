"""Runs under torchrun: what each rank holds once model and optimizer are built, on one layout after the other.

    torchrun --nproc_per_node=4 tests/memory_worker.py PLAN.json

The plan is {"out", "layouts": {name: [overrides of configs/tiny.yaml]}}. Rank 0 writes {name: [[weights, gradients,
optimizer, reference, all tensors that are new] a rank]}, in bytes, to the file "out".
"""

import gc
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

import megatron_bridge as bridge
from support.base import ranks
from support.base.read_config import load_config
from support.check import checks


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of the memory that the tensors lie in."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def held_bytes(model: list, optimizer) -> list[int]:
    """Bytes of weights, gradients, optimizer state and a reference on this rank, read off the tensors themselves.

    Not the optimizer's scalars, its numbers of steps, nor what stands for the host's with optimizer_cpu_offload.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    weights = storages(parameter.data for parameter in parameters)
    state = {}
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        adams = [inner.gpu_optimizer] if isinstance(inner, HybridDeviceOptimizer) else [inner]
        mains = [shard for group in part.shard_fp32_from_float16_groups for shard in group if shard is not None]
        stepped = [shard for adam in adams if adam for group in adam.param_groups for shard in group["params"]]
        moments = [m for adam in adams if adam for s in adam.state.values() for n, m in s.items() if n != "step"]
        state |= storages([*mains, *stepped, *moments])
    own = {address: size for address, size in state.items() if address not in weights}
    reference = storages(bridge.copy_weights(model))
    gradients = storages(parameter.main_grad for parameter in parameters if parameter.requires_grad)
    return [sum(table.values()) for table in (weights, gradients, own, reference)]


def alive() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    return sum(storages(x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)).values())


def main() -> None:
    plan, found = json.loads(Path(sys.argv[1]).read_text()), {}
    for name, overrides in plan["layouts"].items():
        ranks.init_distributed(timeout_s=600)
        cfg = load_config("configs/tiny.yaml", overrides)
        checks.check_config(cfg, dist.get_world_size())
        before = alive()
        bridge.init_model_parallel(cfg.parallel, cfg.seed)
        dtype = bridge.DTYPES[cfg.model.dtype]
        model = bridge.build_model(cfg.model.path, cfg.parallel, dtype, cfg.megatron, trained=cfg.lora)
        optimizer = bridge.build_optimizer(model, cfg.train, cfg.megatron)
        new = alive() - before
        found[name] = ranks.gather([*held_bytes(model, optimizer), new])
        bridge.mpu.destroy_model_parallel()
        dist.destroy_process_group()
        del model, optimizer
    if ranks.is_first_rank():
        Path(plan["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
