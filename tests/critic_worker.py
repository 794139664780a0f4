"""Run in a copy of the sources with the critic of docs/recipes.md, with the tiny model's folder: its values and its
gradient, on one rank, are those of plain transformers."""

import sys
from functools import partial

import numpy as np
import torch
import transformers

from support.base import ranks
from support.base.read_config import load_config
from support.step import critic
from support.step.packing import to_micro_batches
from train_grpo import Sample, add_advantages, bridge, flatten, loss_weights, replace, run_schedule, score

CLIP = 0.3


def reference_loss(model: str, head: torch.Tensor, batch, samples: list) -> tuple:
    """(values [F], gradients by name) of plain transformers with one output, `head` [1, h]."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    parts = []
    for s in samples:
        ids = torch.tensor(np.concatenate([s.prompt_ids, s.response_ids])[:-1])[None].long()
        parts.append((hf.model(ids).last_hidden_state @ head.T)[0, :, 0])
    values_F = torch.cat(parts)
    held_F = torch.minimum(torch.maximum(values_F, batch.values - CLIP), batch.values + CLIP)
    loss_F = torch.maximum((values_F - batch.returns) ** 2, (held_F - batch.returns) ** 2) / 2
    loss_F[batch.mask].mean().backward()
    return (values_F * batch.mask).detach(), {name: weight.grad for name, weight in hf.named_parameters()}


def main(model: str) -> None:
    keys = ["algo.advantage=gae", "algo.critic_lr=1e-3", f"algo.value_clip={CLIP}", f"model.path={model}"]
    cfg = load_config("configs/tiny.yaml", keys)
    ranks.join_ranks(60)
    bridge.init_model_parallel(cfg.parallel, seed=0)
    chunks, optimizer = critic.build(model, cfg)

    rng = np.random.default_rng(0)
    samples = []
    for i in range(8):
        prompt, response = rng.integers(1, 14, 3 + i % 3), rng.integers(1, 14, 2 + i % 4)
        samples.append(Sample(i // 2, prompt, response, rng.normal(size=len(response)), True, "", "", reward=i % 2))
    batch = flatten(samples)
    chosen = list(range(len(samples)))
    old_F = torch.from_numpy(rng.normal(size=len(batch.tokens))).float() * batch.mask / 2
    weights_F = loss_weights(batch, chosen, "token_mean", 4)
    batch = add_advantages(samples, replace(batch, values=old_F, weights=weights_F), cfg.algo)
    micro_batches = to_micro_batches(batch, chosen, 24, cfg)

    head = torch.from_numpy(rng.normal(size=(1, 64))).float() / 10
    bridge.unwrap_model(chunks[0]).output_layer.weight.data.copy_(head)
    values_F, gradients = reference_loss(model, head, batch, samples)
    assert (score(chunks, batch, cfg) - values_F).abs().max() < 1e-5
    bridge.zero_gradients(chunks, optimizer)
    assert len(micro_batches) > 1
    run_schedule(chunks, micro_batches, 1.0, partial(critic.value_loss, clip=CLIP))
    own = dict(bridge.unwrap_model(chunks[0]).named_parameters())
    for name, theirs in {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.layers.0.mlp.linear_fc2.weight": "model.layers.0.mlp.down_proj.weight",
        "decoder.layers.1.self_attention.linear_proj.weight": "model.layers.1.self_attn.o_proj.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }.items():
        assert (own[name].main_grad - gradients[theirs]).abs().max() < 1e-5 * gradients[theirs].abs().max(), name


if __name__ == "__main__":
    main(sys.argv[1])
