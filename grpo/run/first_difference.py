"""Where the trainer's forward pass first has other bits than vLLM's: one sequence through both, layer by layer."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from itertools import chain

import torch
import torch.nn.functional as F

import megatron_bridge as bridge
from grpo.parts.base import ranks
from grpo.parts.model.attention import own_stripe
from grpo.step.packing import pack

# The operations of a layer in their order: name, Megatron's module, vLLM's module.
OPERATIONS = (
    ("the norm before attention", "input_layernorm", "input_layernorm"),
    ("the product that gives query, key and value", "self_attention.linear_qkv", "self_attn.qkv_proj"),
    ("the norm of the query", "self_attention.q_layernorm", "self_attn.q_norm"),
    ("the norm of the key", "self_attention.k_layernorm", "self_attn.k_norm"),
    ("the rotary embedding", "self_attention.core_attention.rotary", "self_attn.rotary_emb"),
    ("attention", "self_attention.core_attention", "self_attn.attn"),
    ("the product after attention", "self_attention.linear_proj", "self_attn.o_proj"),
    ("the norm before the feed-forward block", "pre_mlp_layernorm", "post_attention_layernorm"),
    ("the product that gives gate and up", "mlp.linear_fc1", "mlp.gate_up_proj"),
    ("SwiGLU", "mlp.activation_func", "mlp.act_fn"),
    ("the product after SwiGLU", "mlp.linear_fc2", "mlp.down_proj"),
    ("router and experts", "mlp", "mlp"),
    ("router and experts", "mlp", "block_sparse_moe"),
)
MEGATRON, VLLM = 1, 2  # columns of OPERATIONS


def explain(engine, model, batch, cfg, forward: Callable) -> str:
    """The first operation whose bits differ in the sequence of a batch of one, in a sentence; all ranks call this.

    `forward(model, micro-batches, temperature)` runs passes without a gradient. The engine has the trainer's weights.
    """
    tokens = len(batch.tokens)
    multiple = bridge.token_multiple(cfg.parallel)
    row = pack(batch, [0], -(-tokens // multiple) * multiple, bridge.device())
    with outputs(modules_of(engine.layers(), VLLM)) as theirs:
        engine.compute(batch.tokens.tolist())

    layers = {}
    for chunk in model:
        layers |= {layer.layer_number - 1: layer for layer in bridge.unwrap_model(chunk).decoder.layers}
    with outputs(modules_of(layers, MEGATRON)) as ours:
        forward(model, [row] * cfg.parallel.pp, cfg.rollout.temperature)  # interleaved stages need one row each

    found = None
    for key in sorted(ours.keys() & theirs.keys()):
        own, other = align(key[1], ours[key], theirs[key], row.width, tokens, model[0].hf_config)
        if own.shape == other.shape and (own != other).any():
            largest = (own.float() - other.float()).abs().max()
            found = key, int((own != other).sum()), own.numel(), float(largest)
            break
    everywhere = [part for part in ranks.gather(found) if part]
    if not everywhere:
        return (
            "alone, the sequence has equal bits in all layers: it was packed into its row otherwise, vLLM sampled it "
            "with other weights, or head, temperature or cut differ"
        )
    (layer, number), differ, total, largest = min(everywhere)
    what = f"{OPERATIONS[number][0]} of layer {layer} is the first that differs"
    return f"{what}: {differ} of {total} values, by {largest:.1e} at most"


def modules_of(layers: dict[int, torch.nn.Module], column: int) -> dict[tuple[int, int], torch.nn.Module]:
    """{(layer from 0, number of the operation): module}, as far as the layers have them."""
    found = {}
    for layer, module in layers.items():
        for number, operation in enumerate(OPERATIONS):
            part = module
            for name in operation[column].split("."):
                part = getattr(part, name, None)
            if isinstance(part, torch.nn.Module) and type(part).__name__ != "IdentityOp":  # Megatron's for no norm
                found[layer, number] = part
    return found


@contextmanager
def outputs(modules: dict[tuple[int, int], torch.nn.Module]):
    """{key: the first output of its module}. Calls of a module that layers share are taken in the layers' order."""
    keys, found = defaultdict(list), {}
    for key, module in modules.items():
        keys[module].append(key)

    def note(module, args, output):
        while isinstance(output, tuple):
            output = output[0]
        if keys[module]:
            found[keys[module].pop(0)] = output.detach().clone()  # vLLM changes some in place

    hooks = [module.register_forward_hook(note) for module in keys]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def align(number: int, own: torch.Tensor, theirs: torch.Tensor, width: int, tokens: int, hf) -> tuple:
    """The outputs of an operation, the trainer's on this rank and vLLM's, with the same tokens and the same order.

    Of `width` tokens, the last of them padding, a context-parallel rank has a stripe. Under sequence parallelism a rank
    has a part of that. Shapes that differ in the end cannot be compared.
    """
    own = own.flatten(0, 1).flatten(1)
    if OPERATIONS[number][MEGATRON] == "self_attention.linear_qkv":  # by groups of heads; vLLM: queries, keys, values
        sizes = [*chain(*bridge.group_rows("qkv", hf)[1])]
        if own.shape[1] % sum(sizes):  # this rank has a part of a group, which is not compared
            return own[:0], theirs[:0]
        parts = own.unflatten(1, (-1, sum(sizes))).split(sizes, 2)
        own = torch.cat([part.flatten(1) for part in parts], 1)

    theirs = F.pad(theirs.reshape(tokens, -1), (0, 0, 0, width - tokens))
    theirs = own_stripe(theirs.T).T
    is_real = own_stripe(torch.arange(width, device=own.device)) < tokens
    if len(theirs) > len(own):
        tp = bridge.mpu.get_tensor_model_parallel_group()
        theirs = theirs.chunk(tp.size())[tp.rank()]
        is_real = is_real.chunk(tp.size())[tp.rank()]
    return own[is_real], theirs[is_real]
