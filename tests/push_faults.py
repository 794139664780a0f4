"""train_grpo.py with one fault in its weight pushes, named by the environment variable FAULT; run by torchrun.

skipped: the push after the first step is not made      lost: vLLM never hears of it, on any rank
rank: vLLM of rank 1 never hears of it                  tensor: one tensor of it does not arrive
swapped: the mapping exchanges two rows of a tensor, from the first push on
"""

import os
import sys

import vllm

import megatron_bridge
import train_grpo

FAULT, LOST = os.environ["FAULT"], "model.layers.1.mlp.down_proj.weight"
push_weights, rpc, split_parts = train_grpo.push_weights, vllm.LLM.collective_rpc, megatron_bridge.split_parts
pushes = []  # 1 is the push at the start


def faulty_push(*args) -> None:
    pushes.append(1)
    if not (FAULT == "skipped" and len(pushes) == 2):
        push_weights(*args)


def faulty_rpc(llm, method, *args, kwargs=None, **others):
    if method == "reload_weights" and len(pushes) == 2:
        if FAULT == "lost" or (FAULT == "rank" and os.environ["RANK"] == "1"):
            return None
        if FAULT == "tensor":
            kwargs = {"weights_iterator": (pair for pair in kwargs["weights_iterator"] if pair[0] != LOST)}
    return rpc(llm, method, *args, kwargs=kwargs, **others)


def faulty_split_parts(join, whole, hf):
    parts = split_parts(join, whole, hf)
    if join == "cols":
        parts[0] = parts[0].clone()
        parts[0][[3, 5]] = parts[0][[5, 3]]
    return parts


train_grpo.push_weights, vllm.LLM.collective_rpc = faulty_push, faulty_rpc
if FAULT == "swapped":
    megatron_bridge.split_parts = faulty_split_parts
if __name__ == "__main__":
    sys.exit(train_grpo.main(sys.argv[1:]))
