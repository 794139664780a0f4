"""Parts of Megatron-core 0.16 that make the host wait less often for the GPU. On the CPU results are the same bit for
bit. layers.py installs them; tests/test_gpu_rehearsal.py counts the waits.
"""

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
from megatron.core.utils import local_multi_tensor_l2_norm


def l2_norm(chunk_size, overflow, tensor_lists: list, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """In place of local_multi_tensor_l2_norm, which reads the norm of each gradient from the GPU; → [1], None."""
    (gradients,) = tensor_lists
    return torch.stack(torch._foreach_norm(gradients)).norm().reshape(1), None


def permute(tokens, routing_map, probs=None, num_out_tokens=None, fused=False, drop_and_pad=False):
    """In place of Megatron's, which reads the number of dispatched tokens from the GPU, twice; the router drops none.

    tokens [T, h], routing_map [T, E] bool, probs [T, E], num_out_tokens D = T · k → tokens [D, h] and probs [D] sorted
    by expert, and the number of each one's token [D].
    """
    if fused or drop_and_pad or probs is None or num_out_tokens is None:
        return moe_utils.permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    chosen_D = routing_map.T.flatten().nonzero_static(size=int(num_out_tokens))[:, 0]  # in [E, T]
    token_D = chosen_D % len(tokens)
    return tokens.index_select(0, token_D), probs.T.flatten().index_select(0, chosen_D), token_D


class Dispatcher(token_dispatcher.MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all, which copies the numbers of tokens to the host and waits for them once.

    A rank that holds all experts, whole, needs none: its tokens are sorted by expert when they are permuted.
    """

    @property
    def is_alone(self) -> bool:
        """Whether this rank exchanges tokens with no other."""
        return self.ep_size == 1 and self.tp_size == 1 and not self.drop_and_pad

    def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
        if self.is_alone:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def dispatch_postprocess(self, global_input_tokens, global_probs):
        if not self.is_alone:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(global_input_tokens)
        return global_input_tokens, self.tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states):
        return hidden_states if self.is_alone else super().combine_preprocess(hidden_states)


def install() -> None:
    """Put them into Megatron-core."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # Transformer Engine and Apex have kernels
        clip_grads.l2_norm_impl = l2_norm
    token_dispatcher.permute = permute
    moe_layer.MoEAlltoAllTokenDispatcher = Dispatcher
