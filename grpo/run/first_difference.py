"""Where the trainer's forward pass first has other bits than vLLM's: one sequence through both, layer by layer."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

import megatron_bridge as bridge
from config import Config
from grpo.parts.base import ranks
from grpo.parts.model.attention import own_stripe
from grpo.step.packing import pack
from grpo.step.records import Batch
from rollout import Engine

# The operations of a layer in their order: what each is called, Megatron's module, vLLM's.
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
Outputs = dict[tuple[int, int], torch.Tensor]  # (layer from 0, number of the operation) → what it gave


def explain(engine: Engine, model: list, batch: Batch, cfg: Config, forward: Callable[..., list]) -> str:
    """The first operation whose bits differ in the sequence of a batch of one, in a sentence; all ranks call this.

    `forward(model, micro-batches, temperature)` runs passes without a gradient. The engine has the trainer's weights.
    """
    tokens, multiple = len(batch.tokens), bridge.token_multiple(cfg.parallel)
    row = pack(batch, [0], -(-tokens // multiple) * multiple, bridge.device())
    with outputs(modules_of(engine.layers(), vllm=True)) as theirs:
        engine.compute(batch.tokens.tolist())
    held = [layer for chunk in model for layer in bridge.unwrap_model(chunk).decoder.layers]
    layers = {layer.layer_number - 1: layer for layer in held}
    with outputs(modules_of(layers, vllm=False)) as ours:
        forward(model, [row] * cfg.parallel.pp, cfg.rollout.temperature)  # interleaved stages want so many

    found = []
    for key in sorted(ours.keys() & theirs.keys()):
        other, total, largest = compare(key, ours[key], theirs[key], row.width, tokens, model[0].hf_config)
        if other:
            found.append((key, other, total, largest))
    everywhere = [part for part in ranks.gather(found[:1]) if part]
    if not everywhere:
        return (
            "alone, the sequence has equal bits in all layers: it was packed into its row otherwise, vLLM sampled it "
            "with other weights, or head, temperature or cut differ"
        )
    (layer, number), other, total, largest = min(everywhere)[0]
    what = f"{OPERATIONS[number][0]} of layer {layer} is the first that differs"
    return f"{what}: {other} of {total} values, by {largest:.1e} at most"


def modules_of(layers: dict[int, torch.nn.Module], vllm: bool) -> dict[tuple[int, int], torch.nn.Module]:
    """{(layer, number of the operation): module} of those that there are; Megatron puts an IdentityOp for a norm."""
    found = {}
    for layer, module in layers.items():
        for number, (_, *names) in enumerate(OPERATIONS):
            part = module
            for name in names[vllm].split("."):
                part = getattr(part, name, None)
            if isinstance(part, torch.nn.Module) and type(part).__name__ != "IdentityOp":
                found[layer, number] = part
    return found


@contextmanager
def outputs(modules: dict[tuple[int, int], torch.nn.Module]) -> Iterator[Outputs]:
    """What each module gives first; where vLLM's layers share one, its calls are theirs in order."""
    keys, found = defaultdict(list), {}
    for key, module in modules.items():
        keys[module].append(key)

    def note(module, args, output) -> None:
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


def compare(key: tuple[int, int], own: torch.Tensor, theirs: torch.Tensor, width: int, tokens: int, hf) -> tuple:
    """How many values of an operation differ, of how many, and by how much; of what this rank of the trainer holds.

    Of `width` tokens, the last of them padding, a context-parallel rank has a stripe, and under sequence parallelism a
    rank of that a part.
    """
    own = own.flatten(0, 1).flatten(1)
    if OPERATIONS[key[1]][1] == "self_attention.linear_qkv":  # by groups of heads; vLLM: queries, keys, values
        _, (queries, *others) = bridge.row_blocks("qkv", hf)
        sizes = [*queries, *(size for other in others for size in other)]
        if own.shape[1] % sum(sizes):  # a rank with a part of a group: not judged
            return 0, 0, 0.0
        parts = own.unflatten(1, (-1, sum(sizes))).split(sizes, 2)
        own = torch.cat([part.flatten(1) for part in parts], 1)
    theirs = F.pad(theirs.reshape(tokens, -1), (0, 0, 0, width - tokens))
    theirs = own_stripe(theirs.T).T
    real = own_stripe(torch.arange(width, device=own.device)) < tokens
    if len(theirs) > len(own):
        tp = bridge.mpu.get_tensor_model_parallel_group()
        theirs, real = (x.chunk(tp.size())[tp.rank()] for x in (theirs, real))
    own, theirs = own[real], theirs[real]
    if own.shape != theirs.shape or not own.numel():
        return 0, 0, 0.0
    largest = (own.float() - theirs.float()).abs().max()
    return int((own != theirs).sum()), own.numel(), float(largest)
