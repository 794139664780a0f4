"""Layers of a Megatron-core model that need no Transformer Engine, on the CPU and on GPUs alike.

Importing this file prepares the process for Megatron-core, so other files import it before Megatron-core.
"""

import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from grpo.parts.base.ranks import device
from grpo.parts.model import cpu_backend, kernels

# Every run without Transformer Engine and Apex has these warnings. They need no action.
for message in (
    "Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf", r"\s*The 'megatron.core.transformer.custom_layers",
    "absl.logging is not installed", "MimoModelConfig is experimental", "`torch.distributed",
):  # fmt: skip
    warnings.filterwarnings("ignore", message)

if torch.cuda.device_count() == 0:  # this asks NVML; is_available would start CUDA, which then reads no more variables
    cpu_backend.install()  # before Megatron-core is imported

from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers as linear
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from grpo.parts.model.megatron_versions import HiddenGPT, submodules  # noqa: F401, for the bridge

# ---------------------------------------------------------------- replaced in Megatron-core


def add_product(x, grad, main):
    """Add gradᵀ · x, the gradient of a linear layer's weight, to `main` in the product itself, without a rounding.

    x [M, in], grad [M, out], main [out, in]. On a GPU main may be fp32 where x and grad are bf16 or fp16.
    """
    wider = {} if main.dtype is x.dtype else {"out_dtype": main.dtype}
    torch.addmm(main, grad.t(), x, **wider, out=main)


def l2_norm(size, flag, lists, *unused):
    """The norm of all tensors of lists[0] together. Megatron's own waits for the norm of each."""
    return torch.stack(torch._foreach_norm(lists[0])).norm()[None], None


def scale(size, flag, lists, factor):
    """Multiply all tensors of lists[0], which are lists[1] too. Megatron's own takes two kernels for each."""
    if lists[0]:  # torch refuses an empty list
        torch._foreach_mul_(lists[0], factor)


# Megatron calls Apex for gradient_accumulation_fusion, by these names.
linear.fused_weight_gradient_mlp_cuda = SimpleNamespace(
    wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product
)
linear._grad_accum_fusion_available = True
clip_grads.l2_norm_impl = l2_norm
clip_grads.multi_tensor_scale_impl = scale


# ---------------------------------------------------------------- layers


class RMSNorm(torch.nn.Module):
    """RMS norm that works with sequence parallelism, which Megatron's own torch norm refuses.

    With layernorm_zero_centered_gamma it multiplies by 1 + weight.
    """

    def __init__(self, config, hidden_size, eps=1e-6, **unused):
        super().__init__()
        self.eps = eps
        self.is_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return self.normalize(x, self.weight, self.eps)

    def normalize(self, x, weight, eps):  # matched.py puts its own in place
        if self.is_centered:
            return Normalization.apply(x, 1 + weight.float(), eps)  # 1 + weight is not rounded
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, eps)
        return Normalization.apply(x, weight, eps)


class Activation(MegatronModule):
    """SwiGLU of every feed-forward block, as Megatron's layer spec takes it; [..., 2 f] → [..., f]."""

    def forward(self, gate_up):
        return SwiGLU.apply(gate_up)


class Router(TopKRouter):
    """Megatron's router with a balancing loss that does not depend on tp and cp, and a count of each expert's load.

    What Megatron's own does: docs/dev/field-notes.md. `padding_mask` is True where no response token is predicted. So
    loss and load are of the trained tokens only, and the loss has the same denominator as `token_mean`.
    """

    def __init__(self, config, **options):
        super().__init__(config=config, **options)
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
        normed = x * scale
        wide = weight.float()
        product = grad * normed  # [..., h] fp32
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ wide).unsqueeze(-1) / x.shape[-1]
        torch.mul(grad, wide, out=product).addcmul_(normed, mean, value=-1).mul_(scale)
        return product.to(x.dtype), grad_weight.to(weight.dtype), None


# ---------------------------------------------------------------- logits on a CPU

BLOCK = 1 << 20  # logits that exist in fp32 at a time: they stay in the CPU's cache, and cost no page faults


def row_blocks(logits_M) -> list[slice]:
    """Slices of the rows of logits [M, V / tp], each of BLOCK logits at most, or of one row."""
    rows = max(BLOCK // logits_M.shape[-1], 1)
    return [slice(first, first + rows) for first in range(0, len(logits_M), rows)]
