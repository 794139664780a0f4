"""Layers of a Megatron-core model that need no Transformer Engine, on the CPU and on GPUs alike.

Importing this file prepares the process for Megatron-core, which it imports first.
"""

import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from grpo.parts.base.ranks import device
from grpo.parts.model import cpu_backend, kernels

# Warnings of every run without Transformer Engine and Apex, which need no action.
for message in (
    "Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf", r"\s*The 'megatron.core.transformer.custom_layers",
    "absl.logging is not installed", "MimoModelConfig is experimental", "`torch.distributed",
):  # fmt: skip
    warnings.filterwarnings("ignore", message)

if torch.cuda.device_count() == 0:  # by NVML: is_available starts CUDA, which then reads no variable any more
    cpu_backend.install()  # before Megatron-core is imported

from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers as linear
from megatron.core.transformer import MegatronModule, TransformerConfig, attention
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from grpo.parts.model.megatron_versions import HiddenGPT, submodules  # noqa: F401, for the bridge

# ---------------------------------------------------------------- autograd functions with fewer copies


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up of [gate, up]; [..., 2 f] → [..., f]. Saves only its input; both gradients share one tensor."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        if kernels.runs_on(gate_up):
            return kernels.swiglu(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        if kernels.runs_on(gate_up):
            return kernels.swiglu_grad(gate_up, grad)
        gate, up = gate_up.chunk(2, -1)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, -1)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grads


class Activation(MegatronModule):
    """SwiGLU of every feed-forward block, as Megatron's layer spec takes it; [..., 2 f] → [..., f]."""

    forward = staticmethod(SwiGLU.apply)


class Split(torch.autograd.Function):
    """torch.split, with the gradients of all parts in one tensor; the parts stay views."""

    @staticmethod
    def forward(ctx, x, dim, sizes):
        ctx.dim, ctx.sizes = dim, sizes
        return x.split(sizes, dim)

    @staticmethod
    def backward(ctx, *grads):
        shape = list(grads[0].shape)
        shape[ctx.dim] = sum(ctx.sizes)
        whole = grads[0].new_empty(shape)
        for part, grad in zip(whole.split(ctx.sizes, ctx.dim), grads, strict=True):
            part.copy_(grad)
        return whole, None, None


attention.SplitAlongDim = Split.apply  # splits query, key and value; Megatron's own needs Transformer Engine


def add_product(x: torch.Tensor, grad: torch.Tensor, main: torch.Tensor) -> None:
    """Add the gradient of a linear layer's weight, gradᵀ · x, to `main` in the product itself, without a rounding.

    x [M, in], grad [M, out], main [out, in], which may be fp32 where they are bf16 or fp16 (CUDA alone can).
    """
    wider = {} if main.dtype is x.dtype else {"out_dtype": main.dtype}
    torch.addmm(main, grad.t(), x, **wider, out=main)


# Megatron calls Apex for gradient_accumulation_fusion, by these names.
linear.fused_weight_gradient_mlp_cuda = SimpleNamespace(
    wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product
)
linear._grad_accum_fusion_available = True
# Megatron's own reads each norm back.
clip_grads.l2_norm_impl = lambda size, flag, lists, *_: (torch.stack(torch._foreach_norm(lists[0])).norm()[None], None)


class Rotation(torch.autograd.Function):
    """Rotary embedding: the halves (a, b) of each head become (a cos - b sin, b cos + a sin).

    x [T, 1, heads, d], cos = (cos, cos) and sin = (-sin, sin) [T, 1, 1, d] → [T, 1, heads, d]. Keeps no copy of x.
    """

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        if kernels.runs_on(x):
            return kernels.rotate(x, cos, sin, 1.0)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        if kernels.runs_on(grad):
            return kernels.rotate(grad, cos, sin, -1.0), None, None
        return torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None


class Normalization(torch.autograd.Function):
    """RMS norm of the last dimension in fp32, for the CPU, where torch's own makes three times as many copies.

    x [..., h], weight [h] → [..., h].
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = (size.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed, weight = x * scale, weight.float()
        product = grad * normed  # [..., h] fp32
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ weight).unsqueeze(-1) / x.shape[-1]
        torch.mul(grad, weight, out=product).addcmul_(normed, mean, value=-1).mul_(scale)
        return product.to(x.dtype), grad_weight.to(ctx.saved_tensors[1].dtype), None


# ---------------------------------------------------------------- layers


class RMSNorm(torch.nn.Module):
    """RMS norm that works with sequence parallelism, which Megatron's own torch norm refuses.

    With layernorm_zero_centered_gamma it multiplies by 1 + weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused):
        super().__init__()
        self.eps = eps
        self.is_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel
        self.normalize = None  # a norm in its place, as matched.py has it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.normalize:
            return self.normalize(x, self.weight, self.eps)
        if self.is_centered:  # 1 + weight is not rounded
            return Normalization.apply(x, 1 + self.weight.float(), self.eps)
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return Normalization.apply(x, self.weight, self.eps)


class Router(TopKRouter):
    """Megatron's router with a balancing loss that does not depend on tp and cp, and a count of each expert's load.

    What Megatron's does: docs/dev/field-notes.md. `padding_mask` is True where no response token is predicted: loss and
    load are of the trained tokens only, and the weight matches the denominator of `token_mean`.
    """

    def __init__(self, config, **kwargs):
        super().__init__(config=config, **kwargs)
        self.load = torch.zeros(config.num_moe_experts, device=device())  # tokens per expert, until `expert_load`

    def forward(self, input, padding_mask=None):
        probs, routing_map = super().forward(input, padding_mask)
        if self.training:  # full recompute counts everything twice, which leaves the ratios right
            self.load = self.load + (routing_map & ~padding_mask.reshape(-1, 1)).sum(0)
        return probs, routing_map

    def _apply_aux_loss(self, probs, scores_for_aux_loss, routing_map, with_padding_mask=False):
        """Switch Transformer's loss, arXiv 2101.03961 eq. 4, over the micro-batch: coefficient · E · sum_e f_e P_e."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        experts = self.config.num_moe_experts
        tokens_E = routing_map.sum(0).float()
        dist.all_reduce(tokens_E, group=self.tp_cp_group)
        tokens = tokens_E.sum() / self.topk
        share_E = scores_for_aux_loss.sum(0)  # this rank's part of tokens · P_e
        loss = coefficient * experts * (tokens_E * share_E).sum() / (tokens * self.topk).clamp(min=1)
        return MoEAuxLossAutoScaler.apply(probs, loss)
