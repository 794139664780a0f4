"""What a weight push has to bring: digests of the Hugging Face tensors, computed from this rank's own shards.

They are those of push_check, in which the order of elements counts. Of hf_weights nothing is used, only the table
FAMILIES, the layout of the shards, and the merge of adapters, which is made again.
"""

import math
from itertools import accumulate, chain

import torch
import torch.distributed as dist

import megatron_bridge as bridge
from support.engine.push_check import CHUNK, Shards, digest
from support.model import lora

WORD = 8  # bytes


def read_shards(model: list, optimizer=None) -> Shards:
    """Digests of the tensors that this rank's weights are part of, summed over the ranks that split a weight.

    Without `optimizer` the weights are not compared with its main weights. All ranks call this together, when
    hf_weights has gathered what overlap_param_gather left for later.
    """
    hf = model[0].hf_config
    groups = bridge.process_groups()
    whole, unseen = {}, []
    split = {"parallel.tp": {}, "parallel.etp": {}}  # group that splits a weight → {name: sums of this rank's part}
    for name, weight in bridge.named_weights(model).items():
        join, parts = rule_of(name, hf)
        held = lora.merged_weight(weight) if hasattr(weight, "adapter") else weight.detach()
        if bridge.SPLIT_DIM[join] is None:
            whole[parts[0]] = digest(held, ordered=True)[::2]
            continue
        width = math.gcd(bridge.head_dim(hf), len(held))  # of a bias a row is a head, or the part of one that is here
        rows = held.view(-1, width) if held.dim() == 1 else held
        if rows.shape[1] * rows.element_size() % WORD:
            unseen += parts
            continue
        kind = "parallel.etp" if bridge.is_expert(name) else "parallel.tp"
        height = bridge.head_dim(hf) // (1 if held.dim() > 1 else width)  # rows of a head
        sums = part_sums(join, rows.view(torch.int64), height, groups[kind], hf)
        split[kind] |= zip(parts, sums, strict=True)
    for kind, sums in split.items():
        if sums and groups[kind].size() > 1:
            total = torch.stack([*sums.values()])
            dist.all_reduce(total, group=groups[kind])
            sums |= zip(sums, total, strict=True)
    has_copies = optimizer and model[0].config.params_dtype is not torch.float32  # not in fp32
    stale = stale_weights(model, optimizer) if has_copies else []
    return Shards(whole | split["parallel.tp"] | split["parallel.etp"], unseen, stale)


def part_sums(join: str, words: torch.Tensor, height: int, group: dist.ProcessGroup, hf) -> list[torch.Tensor]:
    """What a shard adds to the sums of each of its Hugging Face tensors, [2] int64 each.

    words [rows, words of a row] of a shard on a rank of the `group` that splits the weight; `height`: rows of a head.
    """
    sums = sum_rows(words)
    heads = hf.num_attention_heads // hf.num_key_value_heads * height
    blocks = {"qkv": [heads, height, height], "gate_up": [len(sums) // 2] * 2}
    heights = blocks.get(join, [len(sums)])  # rows of each tensor in a block; the whole weight repeats such blocks
    number = torch.arange(len(sums), device=sums.device) + group.rank() * len(sums)
    block, within = number // sum(heights), number % sum(heights)
    found = []
    for size, first in zip(heights, accumulate(heights, initial=0), strict=False):
        inside = (first <= within) & (within < first + size)
        rows = sums * inside[:, None]  # those of other tensors are 0
        before = block * size + within - first
        if join == "cols":
            before = within * group.size() + group.rank()
        words_before = words.shape[1] * before  # of the whole tensor
        in_order = rows[:, 1] + 2 * words_before * rows[:, 0]
        found.append(torch.stack([rows[:, 0].sum(), in_order.sum()]))
    return found


def sum_rows(words: torch.Tensor) -> torch.Tensor:
    """Sums of x_i and of (2i + 1) x_i over each row of words [rows, width], i within the row: [rows, 2]."""
    width = words.shape[1]
    odd = torch.arange(1, 1 + 2 * width, 2, device=words.device)
    at_once = max(1, CHUNK[words.device.type] // width)
    return torch.cat([torch.stack([some.sum(1), (some * odd).sum(1)], dim=1) for some in words.split(at_once)])


def stale_weights(model: list, optimizer) -> list[str]:
    """Names of bf16 weights and adapters that differ from this rank's main weights, rounded, if none is offloaded."""
    differ = {}
    for part in optimizer.chained_optimizers:
        groups = (part.model_float16_groups, part.shard_float16_groups, part.shard_fp32_from_float16_groups)
        for weight, shard, main in zip(*map(chain.from_iterable, groups), strict=True):
            if main is not None and main.device == shard.device and not hasattr(main, "host"):
                differ[weight] = (main.to(shard.dtype).view(torch.int16) != shard.view(torch.int16)).any()
    flags = torch.stack([*differ.values()]).tolist() if differ else []  # one copy from the GPU
    stale = {weight for weight, flag in zip(differ, flags, strict=True) if flag}
    named = bridge.named_weights(model) | bridge.named_weights(model, factors=True)
    parts = [rule_of(name, model[0].hf_config)[1] for name, weight in named.items() if weight in stale]
    return [*chain.from_iterable(parts)]


def rule_of(name: str, hf) -> tuple[str, list[str]]:
    """How the Hugging Face tensors of one of this rank's weights are joined, and their names."""
    return bridge.rule_of(bridge.expert_of(name, hf, bridge.mpu.get_expert_model_parallel_rank()), hf)
