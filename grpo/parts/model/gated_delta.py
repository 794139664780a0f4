"""Linear attention by the gated delta rule, in place of attention in three of four layers of Qwen3.5.

Source: Gated Delta Networks, arXiv 2412.06464, eq. 10. A head has a state S [d, e], 0 where a sequence begins:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - k_tᵀ exp(g_t) S_{t-1}))        o_t = S_tᵀ q_t / sqrt(d)

q and k have norm 1, log decay g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b). q, k and v come out of a causal
convolution. Each key head serves `repeat` value heads, which are neighbours.
"""

import numpy as np
import torch
import torch.nn.functional as F

from grpo.parts.base.ranks import to_device
from grpo.parts.model.attention import count_from, from_heads, scatter_heads
from grpo.parts.model.layers import Normalization  # first: it prepares the process for Megatron-core

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

CHUNK = 64  # tokens whose updates are one triangular system

# ---------------------------------------------------------------- the layer


class GatedDeltaNet(MegatronModule):
    """A layer of linear attention with the arguments of Megatron's SelfAttention.

    Tensor parallelism splits the key heads, with their value heads. Context parallelism splits them only for the
    convolution and the rule. The rows of `linear_qkv` are, for each key head: q [d], k [d], v [repeat e], z [repeat e],
    b [repeat], a [repeat]. The rows of `conv` are q, k, v.
    """

    def __init__(self, config, layer_number, pg_collection, **unused):
        super().__init__(config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        heads = config.linear_num_key_heads
        values = config.linear_num_value_heads
        self.repeat = values // heads

        # What goes into a key head and its value heads: q, k and v together, z, b, a.
        width = 2 * self.key_dim + self.repeat * self.value_dim
        parts = [width, self.repeat * self.value_dim, self.repeat, self.repeat]
        linear = {"config": config, "bias": False, "init_method": config.init_method, "tp_group": self.tp_group}
        self.linear_qkv = ColumnParallelLinear(config.hidden_size, heads * sum(parts), gather_output=False, **linear)
        self.linear_qkv.parts = parts  # for LoRA
        self.linear_proj = RowParallelLinear(
            values * self.value_dim, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **linear
        )

        new = self.linear_qkv.weight.new_zeros
        tp = self.tp_group.size()
        self.conv = torch.nn.Parameter(new(heads // tp * width, 1, config.linear_conv_kernel_dim))
        self.A_log = torch.nn.Parameter(new(values // tp, dtype=torch.float32))
        self.dt_bias = torch.nn.Parameter(new(values // tp))
        self.norm = torch.nn.Parameter(new(self.value_dim))
        for split in (self.conv, self.A_log, self.dt_bias):
            split.tensor_model_parallel = True

    def _apply(self, fn, *args):
        """Whatever type the model is cast to, A_log is fp32: g adds up over a sequence."""
        super()._apply(fn, *args)
        self.A_log.data = self.A_log.data.float()
        return self

    def forward(self, hidden, packed_seq_params, **unused):
        """hidden [C / cp (/ tp under sequence parallelism), 1, h] → the same."""
        packing = packed_seq_params
        rows, _ = self.linear_qkv(hidden)
        heads = len(self.A_log) // self.repeat
        rows = rows.view(len(rows), heads, -1)  # [C / cp, key heads, q k v z b a]
        width, values, *_ = self.linear_qkv.parts
        qkv, z, gates = rows.split([width, values, 2 * self.repeat], -1)
        mixed = torch.cat((qkv, gates), -1)
        conv = self.conv.unflatten(0, (heads, -1)).squeeze(2)
        weights = [conv, self.A_log, self.dt_bias]

        # The state passes over whole sequences, so with context parallelism a rank has all tokens of some heads.
        cp = mpu.get_context_parallel_world_size()
        if cp > 1:
            (mixed,) = scatter_heads(mixed)  # [C, key heads / cp, ...]
            weights = [weight.chunk(cp)[mpu.get_context_parallel_rank()] for weight in weights]
        if packing.copies:  # each answer computes the state that its prompt leaves
            mixed = packing.copies.take(mixed)
        out = self.attend(mixed, *weights, packing)  # [T, value heads / cp, e]
        if packing.copies:
            out = out.index_select(0, packing.copies.kept)
        if cp > 1:
            out = from_heads(out, heads * self.repeat)

        # All ranks have this weight. Each has the gradient of its heads, and the backward pass adds them up.
        norm = copy_to_tensor_model_parallel_region(self.norm, group=self.tp_group)
        out = Normalization.apply(out, norm, self.config.layernorm_epsilon)
        gated = out * F.silu(z.reshape(out.shape).float())
        return self.linear_proj(gated.to(hidden.dtype).flatten(1).unsqueeze(1))

    def attend(self, mixed, conv, A_log, dt_bias, packing):
        """Convolution and rule; mixed [T, key heads, q k v b a], conv [key heads, q k v, K] → [T, value heads, e]."""
        width = mixed.shape[-1] - 2 * self.repeat
        qkv, b, a = mixed.split([width, self.repeat, self.repeat], -1)
        beta = b.flatten(1).float().sigmoid()
        g = -A_log.exp() * F.softplus(a.flatten(1).float() + dt_bias.float())

        if not uses_fla(mixed.device, mixed.dtype):
            q, k, v = self.heads(causal_conv(qkv, conv, packing.position_T))
            q = unit(q).repeat_interleave(self.repeat, dim=1)
            k = unit(k).repeat_interleave(self.repeat, dim=1)
            return gated_delta(q, k, v, g, beta, packing.segments.keys_S)

        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        ends = packing.segments.cu_k  # one tensor in all layers, which fla reads on the host once
        qkv, _ = causal_conv1d(qkv.flatten(1)[None], conv.flatten(0, 1), activation="silu", cu_seqlens=ends)
        q, k, v = self.heads(qkv[0].view(len(mixed), -1, width))
        row = (x[None] for x in (q, k, v, g, beta))
        out, _ = chunk_gated_delta_rule(*row, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)
        return out[0]

    def heads(self, qkv):
        """[T, key heads, q k v] → q and k [T, key heads, d], v [T, value heads, e]."""
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.repeat * self.value_dim], -1)
        v = v.unflatten(-1, (self.repeat, -1))
        return q.contiguous(), k.contiguous(), v.flatten(1, 2)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None, **unused):
        """Megatron's sharded state, in which `conv`, `A_log` and `dt_bias` are split by rows."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        split = {"conv": self.conv, "A_log": self.A_log, "dt_bias": self.dt_bias}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        by_rows = dict.fromkeys(split, 0)
        return state | make_sharded_tensors_for_checkpoint(split, prefix, by_rows, sharded_offsets, **groups)


def uses_fla(on, dtype):
    """Whether convolution and rule are fla's kernels. They multiply fp32 in TF32, so that fp32 stays with torch."""
    return on.type == "cuda" and dtype is not torch.float32


def linear_sizes(hf):
    """(layers of linear attention, value heads, numbers of all key heads, numbers of all value heads), or zeros."""
    layers = (getattr(hf, "layer_types", None) or []).count("linear_attention")
    if not layers:
        return 0, 0, 0, 0
    heads = hf.linear_num_value_heads
    keys = hf.linear_num_key_heads * hf.linear_key_head_dim
    return layers, heads, keys, heads * hf.linear_value_head_dim


# ---------------------------------------------------------------- convolution and rule


def unit(x):
    """x / sqrt(|x|² + 1e-6) of the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def causal_conv(x, weight, position_T):
    """silu of the depthwise convolution of each token with the K - 1 before it in its sequence, in fp32.

    x [T, heads, w], weight [heads, w, K], position_T [T] of each token in its sequence → [T, heads, w].
    """
    x = x.float()
    weight = weight.float()
    out = x * weight[..., -1]
    for back in range(1, min(weight.shape[-1], len(x))):
        earlier = x[:-back] * (position_T[back:, None, None] >= back)
        out = out + F.pad(earlier * weight[..., -1 - back], (0, 0, 0, 0, back, 0))
    return F.silu(out)


def gated_delta(q, k, v, g, beta, lengths_S):
    """The rule on a row of sequences, in chunks; q, k [T, H, d], v [T, H, e], g and beta [T, H] → [T, H, e].

    Within a chunk the updates are the solution of a unit lower triangular system. Between chunks the state passes, of
    all sequences at once. What a sequence gives does not depend on its neighbours.
    """
    slots, counts = chunk_slots(lengths_S)
    slot_T = to_device(torch.from_numpy(slots), q.device)

    def cut(x):  # [T, H, ...] → [chunks, H, CHUNK, ...]; padding neither decays nor writes
        x = x.new_zeros(sum(counts) * CHUNK, *x.shape[1:]).index_copy(0, slot_T, x)
        return x.unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()

    q = cut(q * q.shape[-1] ** -0.5)
    k = cut(k)
    v = cut(v)
    decay = cut(g).cumsum(-1)  # log decay since the chunk began, [chunks, H, CHUNK]
    beta = cut(beta[..., None])
    since = decay.exp()[..., None]
    ones = q.new_ones(CHUNK, CHUNK)
    pair = decay[..., :, None] - decay[..., None, :]  # between two tokens
    pair = pair.masked_fill(ones.triu(1) > 0, -torch.inf).exp()

    # Each token's update depends on those before it in the chunk.
    system = beta * (k @ k.mT) * pair  # its diagonal is taken for 1
    identity = ones.diag().diag()
    solved = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True) * beta.mT
    written = solved @ v  # by a state of 0 at the chunk's start
    read = (solved * since.mT) @ k  # from another state, which changes what is written
    inside = (q @ k.mT) * pair
    keep = k * (decay[..., -1:] - decay).exp()[..., None]

    # The n-th chunks of all sequences together, each from the state that its sequence had before.
    of_chunks = [x.split(counts) for x in (written, read, q * since, inside, since[..., -1:, :], keep.mT)]
    state = v.new_zeros(counts[0], v.shape[1], k.shape[-1], v.shape[-1])
    out = []
    for written, read, into, inside, last, keep in zip(*of_chunks, strict=True):
        state = state[: len(written)]
        new = written - read @ state
        out.append(into @ state + inside @ new)
        state = last * state + keep @ new
    rows = torch.cat(out).transpose(1, 2).flatten(0, 1)
    return rows.index_select(0, slot_T)


def chunk_slots(lengths_S) -> tuple[np.ndarray, list[int]]:
    """Where each token is in chunks that begin with each sequence, [T], and how many sequences have an n-th chunk.

    The first chunks of all sequences come before the second ones, and sequences with more chunks come first.
    """
    chunks_S = -(-lengths_S // CHUNK)
    rank_S = np.argsort(np.argsort(-chunks_S, kind="stable"))
    counts = [int((chunks_S > n).sum()) for n in range(chunks_S.max())]

    first = np.cumsum([0, *counts])  # the number of the first of all n-th chunks
    place_T = count_from(np.zeros_like(lengths_S), lengths_S).numpy()
    chunk_T = first[place_T // CHUNK] + np.repeat(rank_S, lengths_S)
    return chunk_T * CHUNK + place_T % CHUNK, counts
