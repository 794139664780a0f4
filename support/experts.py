"""The experts of a layer in two grouped matrix products, instead of one expert after the other."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from support.layers import swiglu  # first: it prepares the process for Megatron-core
from support.lora import grouped_linear

# isort: split
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP


def experts_for(config: TransformerConfig, rank: int = 0) -> type[SequentialMLP]:
    """How a layer computes its experts: grouped, unless megatron.moe_grouped_gemm is false or a row, with adapters of
    `rank` theirs too, is not of whole 16 bytes, which grouped_mm refuses."""
    widths = config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size, rank
    fits = all(width * config.params_dtype.itemsize % 16 == 0 for width in widths)
    return GroupedExperts if config.moe_grouped_gemm and fits else SequentialMLP


class GroupedExperts(SequentialMLP):
    """Megatron's sequential experts, with their weights, names and checkpoints; on the CPU the same bit for bit."""

    def forward(self, hidden_R, tokens_per_expert, probs_R):
        """hidden_R [R, h] sorted by expert, tokens_per_expert [E] with the sum R, probs_R [R] → [R, h], None."""
        for expert in self.local_experts:  # whose modules are not called: with overlap_param_gather, wait for weights
            for module in (expert.linear_fc1, expert.linear_fc2):
                for hook in module._forward_pre_hooks.values():
                    hook(module, ())
        ends_E = tokens_per_expert.to(hidden_R.device, torch.int32).cumsum(0, dtype=torch.int32)
        fc1, fc2 = zip(*((e.linear_fc1.weight, e.linear_fc2.weight) for e in self.local_experts), strict=True)
        gate_up_R = linear(fc1)(hidden_R, ends_E, *fc1)  # [R, 2 ffn / etp]
        if self.config.bias_activation_fusion:
            act_R = weighted_bias_swiglu_impl(gate_up_R, None, probs_R.unsqueeze(-1))
        else:
            act_R = (swiglu(gate_up_R) * probs_R.unsqueeze(-1)).to(hidden_R.dtype)
        return linear(fc2)(act_R, ends_E, *fc2), None

    def named_modules(self, *args, **kwargs):
        """In reverse: Megatron's buffer holds weights from the last to the first, so those of experts lie in order."""
        yield from reversed(list(super().named_modules(*args, **kwargs)))


def linear(weights: tuple[torch.nn.Parameter, ...]) -> Callable[..., torch.Tensor]:
    """The grouped product of weights that are trained, or of frozen ones with adapters."""
    return grouped_linear if hasattr(weights[0], "adapter") else GroupedLinear.apply


class GroupedLinear(torch.autograd.Function):
    """x_R [R, k] sorted by expert, the end of each one's rows [E] int32, E weights [n, k] → [R, n].

    The last end must be R: grouped_mm leaves rows beyond it unwritten.
    """

    @staticmethod
    def forward(ctx, x_R, ends_E, *weights):
        ctx.save_for_backward(x_R, ends_E, *weights)
        if len(x_R) == 0:  # no token for these experts: grouped_mm need not take it on a GPU
            return x_R.new_empty(0, weights[0].shape[0])
        return F.grouped_mm(x_R, stacked(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx, grad_R):
        x_R, ends_E, *weights = ctx.saved_tensors
        if len(x_R) == 0:  # no token for these experts: grouped_mm refuses
            return torch.zeros_like(x_R), None, *map(torch.zeros_like, weights)
        grad_R = grad_R.contiguous()
        grad_x_R = F.grouped_mm(grad_R, stacked(weights), offs=ends_E)
        if not ctx.needs_input_grad[2]:  # frozen, beside adapters of other weights
            return grad_x_R, None, *[None] * len(weights)
        return grad_x_R, None, *F.grouped_mm(grad_R.t(), x_R, offs=ends_E)


def stacked(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """E weights [n, k] as one tensor [E, n, k]: a view where they lie evenly in one storage, as in Megatron's buffer
    (but for those of a reference model, and where a bucket ends between them), else a copy."""
    first, places = weights[0], [weight.storage_offset() for weight in weights]
    step = places[1] - places[0] if len(places) > 1 else first.numel()
    evenly = step > 0 and places == [places[0] + number * step for number in range(len(places))]
    one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if evenly and one_storage and step * first.itemsize % 16 == 0:
        return first.as_strided((len(weights), *first.shape), (step, *first.stride()))
    return torch.stack(weights)
