"""The training state of a checkpoint: main weights and Adam's moments, as Megatron's sharded tensors, on any layout."""

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.utils import unwrap_model

from config import TrainingError
from grpo.parts.base import ranks
from grpo.parts.base.require import require
from grpo.parts.model import fp16
from grpo.parts.model.checkpoint import read_state
from grpo.parts.model.offload import take_back_state
from grpo.parts.model.shards import Sharded, read_sharded

Copies = dict[str, list[torch.Tensor]]  # name of a set → a tensor for each of `trainable_weights`
MOMENTS = ("param", "exp_avg", "exp_avg_sq")  # of each weight, fp32; the first is the main weight

# ---------------------------------------------------------------- weights and their state


def trainable_weights(model: list):
    """This rank's weights that are trained: all of them, or the adapters. If none is trained, all weights."""
    weights = [weight for chunk in model for weight in chunk.parameters()]
    return [weight for weight in weights if weight.requires_grad] or weights


def sharded_weights(model: list) -> dict[torch.nn.Parameter, Sharded]:
    """Megatron's sharded tensor of each of this rank's weights."""
    tensors = {}
    for chunk in map(unwrap_model, model):
        metadata = {"non_homogeneous_layers": bool(chunk.config.linear_num_key_heads)}
        sharded, _ = extract_sharded_tensors_and_factories(chunk.sharded_state_dict(metadata=metadata))
        tensors |= {tensor.data: tensor for tensor in sharded.values()}
    return tensors


def optimizer_weights(model: list, optimizer) -> Iterator[tuple]:
    """(part of the optimizer, number, weight, Megatron's sharded tensor) of every weight that an optimizer updates.

    The order is the same on all ranks of the part's data-parallel group, which shards its state.
    """
    tensors = sharded_weights(model)
    number = 0
    for part in optimizer.chained_optimizers:
        for buffer in part.buffers:
            for weight in buffer.param_index_map:
                yield part, number, weight, tensors[weight]
                number += 1


def mend_state_index(part):
    """Correct, in a distributed optimizer, where the state of each weight is found.

    Megatron-core numbers the weights of a group as they lie in the buffers, but the group has those first that are fp32
    in a model of another dtype.
    """
    for index, group in enumerate(part.opt_group_ranges):
        in_order = sorted(group["params"], key=lambda weight: weight.dtype is not torch.float32)
        for place, weight in enumerate(in_order):
            part.model_param_group_index_map[weight] = (index, place)


def own_slice(part, weight):
    """This rank's shard of a weight's state: its slice of the flat weight, and {moment: values}, {} without a shard."""
    if weight not in part.model_param_gbuf_map:
        return slice(0, 0), {}
    position = part._get_model_param_range_map(weight)["param"]
    own = part._get_main_param_and_optimizer_states(weight)
    own["param"] = own.pop("master_param", own["param"])  # with optimizer_cpu_offload: the weight that Adam steps
    own = {moment: getattr(values, "host", values) for moment, values in own.items()}  # `host` if they are offloaded
    return slice(position.start, position.end), own


def main_weights(model: list, optimizer):
    """{weight: (slice of the flat weight, its fp32 values)} of this rank's shards."""
    mains = {}
    for part, _, weight, _ in optimizer_weights(model, optimizer):
        position, own = own_slice(part, weight)
        if own:
            mains[weight] = position, own["param"].data
    return mains


def set_adam_steps(part, steps):
    """Set Adam's step count in one of Megatron's distributed optimizers, and create a state that is missing.

    Each weight gets a tensor of its own: torch increments them in place.
    """
    optimizer = part.optimizer
    is_hybrid = hasattr(optimizer, "sub_optimizers")  # with optimizer_cpu_offload, for the host and for the GPU
    for inner in optimizer.sub_optimizers if is_hybrid else [optimizer]:
        for group in inner.param_groups:
            for shard in group["params"]:
                state = inner.state[shard]
                for moment in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(moment, torch.zeros_like(shard))
                state["step"] = torch.tensor(float(steps), device=shard.device if group.get("fused") else None)
    if is_hybrid:
        optimizer._sync_sub_optimizers_state_to_hdo()


def optimizer_steps(optimizer):
    """Number of updates so far, Adam's step count. All ranks call this: some may have a stage that trains no weight."""
    return max(ranks.gather(own_steps(optimizer)))


def own_steps(optimizer):
    """Adam's step count on this rank; 0 if its stage trains no weight."""
    states = [state for part in optimizer.chained_optimizers for state in part.optimizer.state.values()]
    return int(states[0]["step"]) if states else 0


# ---------------------------------------------------------------- saving and loading


def sharded_copies(model: list, copies: Copies) -> dict[str, Sharded]:
    """Further sets of this rank's weights as Megatron's sharded tensors, in their own dtype. A stage without adapters
    has frozen weights in a set, which need no copy.
    """
    tensors = sharded_weights(model)
    state = {}
    for name, values_of in copies.items():
        for number, (weight, values) in enumerate(zip(trainable_weights(model), values_of, strict=True)):
            if weight.requires_grad:
                tensor = tensors[weight]
                state[f"{name}.{number}"] = dataclasses.replace(tensor, key=f"{name}.{tensor.key}", data=values)
    return state


def sharded_state(model: list, optimizer, loading) -> dict[str, Sharded]:
    """Main weights and Adam's moments as Megatron's sharded tensors, 12 bytes a weight: all there is to save.

    With `loading` only a description, without values, for `load_state`. For saving, the shards of a weight's state are
    added up on one replica, another for each weight. Why not in Megatron's own way: docs/dev/field-notes.md.
    """
    state = {}
    for part, number, weight, tensor in optimizer_weights(model, optimizer):
        group = part.data_parallel_group
        owner = number % group.size()
        replica = tensor.replica_id
        if not loading:
            replica = (*replica[:2], int(group.rank() != owner))
        position, own = own_slice(part, weight)

        for moment in MOMENTS:
            whole = torch.empty(weight.shape, dtype=torch.float32, device="meta")
            if not loading:
                bits = torch.zeros(weight.numel(), dtype=torch.int32, device=weight.device)  # so that -0.0 stays -0.0
                if own:
                    bits[position] = own[moment].detach().view(torch.int32)
                dist.reduce(bits, group_dst=owner, group=group)
                if group.rank() == owner:
                    whole = bits.view(torch.float32).view(weight.shape).cpu()

            fields = {"key": f"{moment}.{tensor.key}", "data": whole, "replica_id": replica}
            if isinstance(tensor, ShardedTensor):  # a factory takes the dtype of its data
                fields["dtype"] = torch.float32
            state[f"{number}.{moment}"] = dataclasses.replace(tensor, **fields)
    return state


def restore(path: Path, model: list, optimizer, copies: Copies | None = None, others: Collection[str] | None = ()):
    """Load weights and moments, and the values of `copies`, from a checkpoint of any layout. Returns its state.

    `others` are the first words of the keys that somebody else reads; None means any. Raises CheckpointError, before
    any change, also if a key is read by nobody. Raises TrainingError unless the optimizer then counts the checkpoint's
    updates and has moments.
    """
    state = read_state(path)
    take_back_state(optimizer)
    sets = sharded_copies(model, copies or {})
    loaded = read_sharded(path, sharded_state(model, optimizer, loading=True) | sets, others=others)
    load_state(model, optimizer, loaded, state["updates"])
    for name, tensor in sets.items():
        tensor.data.copy_(loaded[name])
    fp16.set_scaler_state(optimizer, state.get("loss_scale"))  # older checkpoints have none

    steps = optimizer_steps(optimizer)
    states = [own_slice(part, weight)[1] for part, _, weight, _ in optimizer_weights(model, optimizer)]
    has_moments = any(own and own["exp_avg_sq"].any() for own in states)
    require(
        steps == state["updates"] and (steps == 0 or any(ranks.gather(has_moments))),
        f"{path} is of {state['updates']} updates, but after its load Adam counts {steps}, or all its moments are 0",
        TrainingError,
    )
    return state


def load_state(model: list, optimizer, loaded, steps):
    """Copy in the values that `sharded_state` described, as they were after `steps` updates."""
    for part, number, weight, _ in optimizer_weights(model, optimizer):
        position, own = own_slice(part, weight)
        if own:
            for moment in MOMENTS:
                own[moment].data.copy_(loaded[f"{number}.{moment}"].flatten()[position])

    for part in optimizer.chained_optimizers:
        set_adam_steps(part, steps)
        for main, stepped in getattr(part.optimizer, "param_to_inner_param", {}).items():  # with optimizer_cpu_offload
            main.data.copy_(stepped.data)
        part._copy_main_params_to_model_params()
    for chunk in model:
        chunk.start_param_sync(force_sync=True)
