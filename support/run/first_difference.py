"""Where the trainer's forward pass first has other bits than vLLM's: one sequence through both, layer by layer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

import megatron_bridge as bridge
from support.base import ranks
from support.model.attention import own_stripe

# Of a layer, in the order of the forward pass: what it is called, Megatron's module, vLLM's.
OPERATIONS = (
    ("norm before attention", "input_layernorm", "input_layernorm"),
    ("product with the weights of query, key and value", "self_attention.linear_qkv", "self_attn.qkv_proj"),
    ("norm of the queries", "self_attention.q_layernorm", "self_attn.q_norm"),
    ("norm of the keys", "self_attention.k_layernorm", "self_attn.k_norm"),
    ("rotary embedding", "self_attention.core_attention.rotation", "self_attn.rotary_emb"),
    ("attention", "self_attention.core_attention", "self_attn.attn"),
    ("product with the output weights of attention", "self_attention.linear_proj", "self_attn.o_proj"),
    ("norm before the feed-forward block", "pre_mlp_layernorm", "post_attention_layernorm"),
    ("product with the gate and up weights", "mlp.linear_fc1", "mlp.gate_up_proj"),
    ("SwiGLU", "mlp.activation_func", "mlp.act_fn"),
    ("product with the down weights", "mlp.linear_fc2", "mlp.down_proj"),
    ("experts", "mlp", "mlp"),
    ("experts", "mlp", "block_sparse_moe"),
)


@contextmanager
def recorded(modules: dict[tuple, torch.nn.Module], found: dict) -> Iterator[None]:
    """Note the first output of each module in `found`, by its key; of a shared module that of each call, in order."""
    with ExitStack() as stack:
        for key, module in modules.items():

            def note(module, args, output, key=key):
                while isinstance(output, tuple):
                    output = output[0]
                found.setdefault(key, []).append(output.detach().clone())

            stack.enter_context(module.register_forward_hook(note))
        yield


def own_modules(model: list) -> dict[tuple, torch.nn.Module]:
    """{(layer from 0, number of the operation): module} of this rank's chunks."""
    found = {}
    for chunk in map(bridge.unwrap_model, model):
        for layer in chunk.decoder.layers:
            for number, (_, name, _) in enumerate(OPERATIONS):
                module = find(layer, name)
                if module is not None:
                    found[layer.layer_number - 1, number] = module
    return found


def find(module: torch.nn.Module, path: str) -> torch.nn.Module | None:
    """The submodule, or None; Megatron puts an IdentityOp where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, torch.nn.Module) and type(module).__name__ != "IdentityOp" else None
