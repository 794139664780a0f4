"""One update of plain transformers in float64, one unpadded sequence at a time, and the log-probs of answers."""

from collections.abc import Callable

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from config import AlgoConfig
from oracle import formulas

TEMPERATURE = 0.8
ALGO = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.05, "entropy_coef": 0.01}


def delta_by_steps(query, key, value, g, beta, **options) -> tuple[torch.Tensor, None]:
    """The gated delta rule position by position (arXiv 2412.06464, eq. 10), in place of transformers', which is in fp32
    whatever the type; query and key [1, T, H, d], value [1, T, H, e], g and beta [1, T, H] → [1, T, H, e].
    """
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    state, out = 0.0, []
    for t in range(query.shape[1]):
        q, k, v, decay, rate = (x[0, t, :, None] for x in (query, key, value, g.exp(), beta))
        state = decay[..., None] * (state + torch.zeros_like(k.mT @ v))
        state = state + k.mT @ (rate[..., None] * (v - k @ state))
        out.append(q @ state * q.shape[-1] ** -0.5)
    return torch.stack(out)[None, :, :, 0], None


def float64_model(folder):
    for family in (modeling_qwen3_5, modeling_qwen3_5_moe):
        family.torch_chunk_gated_delta_rule = delta_by_steps
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    model.model.embed_tokens.padding_idx = None  # transformers would drop that row's gradient
    model.config.use_cache = False
    return model


def token_logps(model, row: dict, temperature: float) -> torch.Tensor:
    """Log-probs of all tokens at each place of the response, [response, vocabulary]; -1e9 for those that are not in its
    nucleus, whose probability is thus exactly 0."""
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / temperature
    if "nuclei" in row:
        is_out, place = torch.ones_like(logits, dtype=torch.bool), 0
        for token in row["nuclei"]:
            if token < 0:
                place += 1
            else:
                is_out[place, token] = False
        logits = logits.masked_fill(is_out, -1e9)
    return logits.log_softmax(-1)


def chosen(logps: torch.Tensor, row: dict) -> torch.Tensor:
    """Of those of all tokens, the log-probs of the response tokens, [response]."""
    return logps.gather(-1, torch.tensor(row["response_ids"])[:, None])[:, 0]


def reference(folder, samples: list[dict], given: dict, load: Callable = float64_model, **algo) -> dict:
    """Loss, log-probs [F] and gradients of one update on the samples, of the model that `load` makes of the folder.

    `given` holds the old and reference log-probs [F] the worker made up; `algo` are keys of that section.
    """
    algo = AlgoConfig(**ALGO | algo)
    model, position, total, logps = load(folder), 0, 0.0, []
    counts = [len(s["response_ids"]) for s in samples]
    weights = formulas.answer_weights(counts, algo.loss_norm, 32)
    for s, weight in zip(samples, weights, strict=True):
        all_logp = token_logps(model, s, TEMPERATURE)
        logp = chosen(all_logp, s)
        position += len(s["prompt_ids"]) - 1
        here = slice(position, position + len(logp))
        old, ref = (given[name][here].double() for name in ("old_logp", "ref_logp"))
        advantages, rollout = torch.full_like(old, s["advantage"]), torch.tensor(s["rollout_logp"]).double()
        entropy, weights_T = -(all_logp.exp() * all_logp).sum(-1), torch.full_like(old, weight)
        loss_T, *_ = formulas.answer_loss(logp, old, ref, rollout, advantages, weights_T, entropy, algo)
        part = loss_T.sum() / sum(counts)
        part.backward()
        total, position = total + part.item(), position + len(logp)
        logps += [logp.new_zeros(len(s["prompt_ids"]) - 1), logp.detach()]
    return {"loss": total, "logp": torch.cat(logps), **hf_gradients(model)}


def hf_gradients(model) -> dict[str, torch.Tensor]:
    """Gradients under the names of the safetensors, which hold fused experts apart."""
    own = model.named_parameters()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own}
    return {f"grad.{name}": grad for name, grad in revert_weight_conversion(model, gradients).items()}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def worst_gradient(found: dict, wanted: dict) -> tuple[float, str]:
    return max((relative(found[name], wanted[name]), name) for name in wanted if name.startswith("grad."))
