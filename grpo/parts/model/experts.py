"""The experts of a layer by two grouped matrix products, instead of one expert after the other."""

import torch
import torch.nn.functional as F

from grpo.parts.model.layers import SwiGLU  # first: it prepares the process for Megatron-core
from grpo.parts.model.lora import grouped_linear

# isort: split
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP


def experts_for(config, rank=0) -> type[SequentialMLP]:
    """The class that computes a layer's experts, with LoRA adapters of `rank`; 0 means none.

    It is GroupedExperts, unless megatron.moe_grouped_gemm is false or a row is no multiple of 16 bytes, which
    grouped_mm refuses.
    """
    widths = [config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size, rank]
    is_aligned = all(width * config.params_dtype.itemsize % 16 == 0 for width in widths)
    return GroupedExperts if config.moe_grouped_gemm and is_aligned else SequentialMLP


class GroupedExperts(SequentialMLP):
    """Megatron's sequential experts, with their weights, names and checkpoints. On the CPU the bits are the same."""

    def forward(self, hidden_D, tokens_per_expert, probs_D):
        """hidden_D [D, h] sorted by expert, tokens_per_expert [E] with the sum D, probs_D [D] → [D, h], None."""
        # The experts' modules are not called, but their hooks are: with overlap_param_gather these wait for weights.
        for expert in self.local_experts:
            for module in (expert.linear_fc1, expert.linear_fc2):
                for hook in module._forward_pre_hooks.values():
                    hook(module, ())

        # The numbers may be on the host, in pinned memory.
        ends_E = tokens_per_expert.to(hidden_D.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        fc1 = [expert.linear_fc1.weight for expert in self.local_experts]
        fc2 = [expert.linear_fc2.weight for expert in self.local_experts]
        gate_up_D = linear(hidden_D, ends_E, *fc1)  # [D, 2 ffn / etp]
        if self.config.bias_activation_fusion:
            act_D = weighted_bias_swiglu_impl(gate_up_D, None, probs_D.unsqueeze(-1))
        else:
            act_D = (SwiGLU.apply(gate_up_D) * probs_D.unsqueeze(-1)).to(hidden_D.dtype)
        return linear(act_D, ends_E, *fc2), None

    def named_modules(self, *args, **options):
        """In reverse, because Megatron's buffer stores weights from last to first: experts are in order there."""
        return reversed(list(super().named_modules(*args, **options)))


def linear(x_D, ends_E, *weights):
    """The linear layer of E experts, whose weights may have adapters; [D, in] → [D, out]."""
    function = grouped_linear if hasattr(weights[0], "adapter") else GroupedLinear.apply
    return function(x_D, ends_E, *weights)


class GroupedLinear(torch.autograd.Function):
    """x_D [D, k] sorted by expert, ends_E [E] int32 where each expert's rows end, E weights [n, k] → [D, n].

    The last end must be D, because grouped_mm leaves rows beyond it uninitialized. With D = 0 it is not called: on a
    GPU it may refuse that.
    """

    @staticmethod
    def forward(ctx, x_D, ends_E, *weights):
        ctx.save_for_backward(x_D, ends_E, *weights)
        if len(x_D) == 0:
            return x_D.new_empty(0, len(weights[0]))
        return F.grouped_mm(x_D, stack_weights(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx, grad_D):
        x_D, ends_E, *weights = ctx.saved_tensors
        if len(x_D) == 0:
            return torch.zeros_like(x_D), None, *[torch.zeros_like(weight) for weight in weights]
        grad_D = grad_D.contiguous()
        grad_x_D = F.grouped_mm(grad_D, stack_weights(weights), offs=ends_E)
        if not ctx.needs_input_grad[2]:  # frozen, where adapters of other weights are trained
            return grad_x_D, None, *[None] * len(weights)
        return grad_x_D, None, *F.grouped_mm(grad_D.t(), x_D, offs=ends_E)


def stack_weights(weights):
    """E weights [n, k] as [E, n, k]: a view if they are evenly spaced in one storage, as they mostly are, or a copy."""
    first = weights[0]
    offsets = [weight.storage_offset() for weight in weights]
    stride = offsets[1] - offsets[0] if len(weights) > 1 else first.numel()
    are_even = stride > 0 and offsets == [offsets[0] + n * stride for n in range(len(weights))]
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    if are_even and len(storages) == 1 and stride * first.itemsize % 16 == 0:
        return first.as_strided((len(weights), *first.shape), (stride, *first.stride()))
    return torch.stack(weights)
