"""Parts of Megatron-core 0.16 that make the host wait less often for the GPU. On the CPU results are the same bit for
bit. layers.py installs them; tests/test_gpu_rehearsal.py counts the waits.
"""

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
from megatron.core.utils import get_model_config, local_multi_tensor_l2_norm


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


class StageLink(P2PCommunicator):
    """Megatron's link to the stages before and after, where rows have several lengths and every stage knows them.

    Megatron's own sends the shape of each row ahead of it, and the host waits for that. Activations and gradients come
    in the order of the micro-batches, unless stages are interleaved.
    """

    def __init__(self, config, groups: ProcessGroupCollection, lengths: list[int]):
        super().__init__(groups.pp, config)
        options = {"micro_batch_size": 1, "decoder_seq_length": None, "config": config}
        options |= {"tp_group": groups.tp, "cp_group": groups.cp}
        shapes = [schedules.get_tensor_shapes(seq_length=length, **options)[0] for length in lengths]
        self.of_activations, self.of_gradients = iter(shapes), iter(shapes)

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        from_previous = next(self.of_activations) if recv_prev else None
        from_next = next(self.of_gradients) if recv_next else None
        return from_previous, from_next


def stage_options(model: list, micro_batches: list) -> dict:
    """Arguments of Megatron's schedule that tell each pipeline stage the length of every row.

    {} without a pipeline, and where stages are interleaved: rows have one length there.
    """
    config = get_model_config(model[0])
    if not config.variable_seq_lengths:
        return {}
    lengths = [mb.tokens.shape[1] for mb in micro_batches]
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "embd", "pos_embd", "dp_cp"])
    return {"p2p_communicator": StageLink(config, groups, lengths), "pg_collection": groups}


def install() -> None:
    """Put them into Megatron-core."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # Transformer Engine and Apex have kernels
        clip_grads.l2_norm_impl = l2_norm
    token_dispatcher.permute = permute
    moe_layer.MoEAlltoAllTokenDispatcher = Dispatcher
