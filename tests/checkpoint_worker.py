"""Runs under torchrun: saves the training state of a model on one layout and reads it on the others.

    torchrun --nproc_per_node=4 tests/checkpoint_worker.py MODEL DTYPE OUT '{"tp2": {"tp": 2}, ...}' RANK_OF_ADAPTERS

A layout's "megatron" holds options of Megatron-core. The first layout makes three updates and saves, with a copy of the
weights before them. Every other one loads that and saves what it has; rank 0 compares all of it bit by bit, and the
weights after one more update. Prints "LAYOUT: same", or what differs.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

import megatron_bridge as bridge
from config import LoraConfig, ParallelConfig, TrainConfig
from grpo.parts.base import ranks
from grpo.parts.model import lora
from grpo.parts.model.checkpoint import CheckpointWriter, find_damage, read_state
from grpo.parts.model.optimizer_state import optimizer_steps, restore, sharded_copies, sharded_state

TRAIN = TrainConfig(lr=1e-3)


def made_up_update(model, optimizer, number):
    """A step whose gradient depends on the weights alone, whatever the layout."""
    for chunk in model:
        chunk.zero_grad_buffer()
        for weight in filter(lambda weight: weight.requires_grad, chunk.parameters()):
            weight.main_grad.copy_(torch.sin(50 * weight.detach().float() + number))
    bridge.optimizer_step(optimizer, TRAIN.lr, offloaded=False)


def whole_tensors(checkpoint) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, put together from its boxes without the code under test."""
    found = {}
    for path in checkpoint.glob("rank_*.safetensors"):
        file = safe_open(path, "pt")
        shapes = json.loads(file.metadata()["shapes"])
        for name in file.keys():  # noqa: SIM118, this is no dict
            key, _, offset = name.rpartition("@")
            whole, box = found.setdefault(key, torch.full(shapes[name], torch.nan)), file.get_tensor(name)
            place = tuple(slice(int(a), int(a) + n) for a, n in zip(offset.split(","), box.shape, strict=True))
            assert whole[place].isnan().all(), f"{key} was saved twice"
            whole[place] = box
    return found


def main():
    path, dtype, out, layouts = sys.argv[1], bridge.DTYPES[sys.argv[2]], Path(sys.argv[3]), json.loads(sys.argv[4])
    adapters = LoraConfig(rank=int(sys.argv[5]))
    ranks.join_ranks(timeout_s=600)
    first = None
    for name, sizes in layouts.items():
        extra = sizes.pop("megatron", {})
        parallel = ParallelConfig(**sizes)
        bridge.init_model_parallel(parallel, seed=0)
        model = bridge.build_model(path, parallel, dtype, extra, adapters=adapters)
        optimizer = bridge.build_optimizer(model, TRAIN, extra)
        copies = {"ema": bridge.copy_weights(model)}  # a set of weights of a fork: of before the updates
        if first is None:
            for number in range(3):
                made_up_update(model, optimizer, number)
        else:
            assert find_damage(first) is None
            copies["ema"] = [torch.zeros_like(weight) for weight in copies["ema"]]
            restore(first, model, optimizer, copies)
        writer = CheckpointWriter(out / name, keep_last=1, keep_every=0)
        sharded = sharded_state(model, optimizer, loading=False) | sharded_copies(model, copies)
        writer.start(3, {"updates": optimizer_steps(optimizer)}, sharded)
        made_up_update(model, optimizer, 3)  # while it is written: what was copied must not change
        saved = writer.finish()
        weights = dict(bridge.hf_weights(model))
        if first is None:
            first = saved
            wanted = weights
        if dist.get_rank() == 0:
            was, now = whole_tensors(first), whole_tensors(saved)
            different = [key for key in was | now if key not in was or key not in now or not was[key].equal(now[key])]
            different += [key for key in was if was[key].isnan().any()]
            # One more update after loading: Adam's step counts for it too.
            different += [key for key in wanted if not torch.allclose(wanted[key], weights[key], rtol=1e-5, atol=1e-7)]
            assert not adapters.rank or all(key.endswith(lora.FACTORS) for key in was), "more than the adapters"
            same_state = read_state(first) == read_state(saved) == {"updates": 3}
            print(f"{name}: {different or ('same' if same_state and len(was) >= 32 else 'state')}", flush=True)
        bridge.mpu.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
