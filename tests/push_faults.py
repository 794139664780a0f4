"""train_grpo.py with one fault in its weight pushes, named by the environment variable FAULT; run by torchrun.

Behind Engine.load_weights, in the push after step 1:
skipped: the push is not made
rank: vLLM of rank 1 never hears of it                  tensor: one tensor of it does not arrive
Before Engine.load_weights, in the push after step 2:
old, old rank, old tensor: tensors of the push before, all of them, all on rank 1, or one
rows: two rows of a tensor exchanged                    bucket: a gathered bucket is overwritten
copy: bf16 weights are not copied from the main weights
From the first push on:
swapped: the mapping exchanges two rows of a tensor
"""

import os
import sys

import vllm
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

import megatron_bridge
import train_grpo

FAULT, RANK = os.environ["FAULT"], os.environ["RANK"]
LOST = "model.layers.1.mlp.down_proj.weight"
push_weights, rpc, split_parts = train_grpo.push_weights, vllm.LLM.collective_rpc, megatron_bridge.split_parts
load_weights, gather_bucket = train_grpo.Engine.load_weights, megatron_bridge.gather_bucket
copy_main = DistributedOptimizer._copy_main_params_to_model_params
pushes = []  # 1 is the push at the start
before = {}  # tensors of the push before


def faulty_push(*args) -> None:
    pushes.append(1)
    if not (FAULT == "skipped" and len(pushes) == 2):
        push_weights(*args)


def faulty_rpc(llm, method, *args, kwargs=None, **others):
    if method == "reload_weights" and len(pushes) == 2:
        if FAULT == "rank" and RANK == "1":
            return None
        if FAULT == "tensor":
            kwargs = {"weights_iterator": (pair for pair in kwargs["weights_iterator"] if pair[0] != LOST)}
    return rpc(llm, method, *args, kwargs=kwargs, **others)


def faulty_load(engine, weights, *args) -> None:
    load_weights(engine, spoil(weights), *args)


def spoil(weights):
    """The pairs, with the fault in the third push."""
    now = len(pushes) == 3
    for name, tensor in weights:
        old = before.get(name)
        before[name] = tensor.clone()
        if now and (
            FAULT == "old" or (FAULT == "old rank" and RANK == "1") or (FAULT == "old tensor" and name == LOST)
        ):
            tensor = old
        if now and FAULT == "rows" and name == LOST:
            tensor = exchange_rows(tensor)
        yield name, tensor


def exchange_rows(tensor):
    tensor = tensor.clone()
    tensor[[3, 5]] = tensor[[5, 3]]
    return tensor


def faulty_bucket(*args):
    flat = gather_bucket(*args)
    if len(pushes) == 3 and RANK == "0":
        flat[:, -1] = 0
    return flat


def faulty_copy(optimizer) -> None:
    if len(pushes) != 2:
        copy_main(optimizer)


def faulty_split_parts(join, whole, hf):
    parts = split_parts(join, whole, hf)
    if join == "cols":
        parts[0] = exchange_rows(parts[0])
    return parts


train_grpo.push_weights, vllm.LLM.collective_rpc = faulty_push, faulty_rpc
train_grpo.Engine.load_weights = faulty_load
if FAULT == "swapped":
    megatron_bridge.split_parts = faulty_split_parts
if FAULT == "bucket":
    megatron_bridge.gather_bucket = faulty_bucket
if FAULT == "copy":
    DistributedOptimizer._copy_main_params_to_model_params = faulty_copy
if __name__ == "__main__":
    sys.exit(train_grpo.main(sys.argv[1:]))
