"""An update by the oracle's model and formulas in float64, an answer at a time: the reference of every layout."""

from contextlib import ExitStack
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from config import AlgoConfig
from oracle import formulas
from oracle.models import Model, initial_factors, merge_factors
from tests.layout_worker import made_up_factor

TEMPERATURE = 0.8
ALGO = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.05, "entropy_coef": 0.01}


def make_samples() -> list[dict]:
    """14 answers of 1 to 30 tokens to four prompts, of one token and more, and three of one token."""
    rng = np.random.default_rng(4)
    samples = []
    prompts = [rng.integers(2, 16, length) for length in (8, 1, 5, 6)]
    for n in range(14):
        prompt = prompts[n // 4]
        response = rng.integers(0, 16, 1 if n % 5 == 0 else rng.integers(1, 31))
        sample = {"group": n // 4, "prompt_ids": prompt.tolist(), "response_ids": response.tolist(), "finished": True}
        sample |= {"rollout_logp": rng.normal(-2.5, 0.5, len(response)).tolist(), "advantage": rng.normal()}
        samples.append(sample | {"text": "", "source": "s"})
    return samples


def reference(folder, given, samples=None, model=None, lora=None, others=None, **algo) -> dict:
    """Loss, log-probs [F] and gradients of one update on the samples, by the weights of a folder.

    `given` holds the old and reference log-probs [F] that the worker made up, and `algo` has keys of that section. With
    `lora` the gradients are of made-up factors, and "merged.<name>" are the weights with them. `others` has the folders
    of the models for {"ref_kl", "teacher_kl"}, divergences over the whole vocabulary.
    """
    others = {name: (float64_model(other), file_weights(other)) for name, other in (others or {}).items()}
    model = model or float64_model(folder)
    samples = samples or make_samples()
    algo = AlgoConfig(**ALGO | algo)
    weights = leaves = file_weights(folder)
    if lora:
        leaves = made_up_factors(weights, lora)
    for leaf in leaves.values():
        leaf.requires_grad_()
    if lora:
        weights = merge_factors(weights, leaves, lora, "fp32")

    place = 0
    total = 0.0
    logps = []
    counts = [len(s["response_ids"]) for s in samples]
    weights_N = formulas.answer_weights(counts, algo.loss_norm, 32)
    for s, weight in zip(samples, weights_N, strict=True):
        # The answer's log-probs, and the worker's at its positions.
        all_logp = vocabulary_logp(model, weights, s)
        logp = all_logp.gather(-1, torch.tensor(s["response_ids"])[:, None])[:, 0]
        place += len(s["prompt_ids"]) - 1
        old, ref = (given[name][place : place + len(logp)].double() for name in ("old_logp", "ref_logp"))
        place += len(logp)
        logps += [logp.new_zeros(len(s["prompt_ids"]) - 1), logp.detach()]

        # Its loss.
        entropy = -(all_logp.exp() * all_logp).sum(-1)
        rollout = torch.tensor(s["rollout_logp"]).double()
        advantages = torch.full_like(old, s["advantage"])
        weights_T = torch.full_like(old, weight)
        apart = {}
        for name, other in others.items():
            seen = s | {"prompt_ids": s["asked"]} if name == "teacher_kl" and "asked" in s else s
            with torch.no_grad():
                logq = vocabulary_logp(*other, seen, rows=all_logp.shape[1])
            how = (algo.teacher_kl, algo.teacher_beta, algo.teacher_top_k) if name == "teacher_kl" else ()
            apart[name] = formulas.divergence(all_logp, logq, *how)
        loss_T, *_ = formulas.answer_loss(logp, old, ref, rollout, advantages, weights_T, entropy, algo, **apart)
        total = total + loss_T.sum() / sum(counts)

    found = {"loss": total.item(), "logp": torch.cat(logps), **gradients(total, leaves)}
    if lora:
        found |= {f"merged.{name}": weight.detach() for name, weight in weights.items()}
    return found


def vocabulary_logp(model, weights, s, rows=None):
    """Log-probs of all tokens, or the first `rows`, at each place of the response, [response, vocabulary]; -1e9 for
    tokens that are not in the sample's nucleus, whose probability is thus exactly 0.
    """
    logits = model.logits(weights, [s["prompt_ids"]], [s["response_ids"]], TEMPERATURE)[:, :rows]
    if "nuclei" in s:
        is_out = torch.ones_like(logits, dtype=torch.bool)
        place = 0
        for token in s["nuclei"]:
            if token < 0:  # the end of a nucleus
                place += 1
            else:
                is_out[place, token] = False
        logits = logits.masked_fill(is_out, -1e9)
    return logits.log_softmax(-1)


def gradients(total, leaves) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(total, leaves.values(), materialize_grads=True)
    return {f"grad.{name}": grad for name, grad in zip(leaves, found, strict=True)}


# ---------------------------------------------------------------- models and weights


def float64_model(folder) -> Model:
    """The oracle's model, whose gated delta rule computes in the dtype of its weights."""
    with ExitStack() as stack:
        for family in (modeling_qwen3_5, modeling_qwen3_5_moe):
            stack.enter_context(mock.patch.object(family, "torch_chunk_gated_delta_rule", delta_by_steps))
        return Model(folder)


def file_weights(folder) -> dict[str, torch.Tensor]:
    return {name: weight.double() for name, weight in load_file(folder / "model.safetensors").items()}


def made_up_factors(weights, lora) -> dict[str, torch.Tensor]:
    """{name of a factor: its values in float64, as the worker has them}."""
    shapes = initial_factors(weights, lora)
    return {name: made_up_factor(name, factor.shape).double() for name, factor in shapes.items()}


def delta_by_steps(query, key, value, g, beta, **options):
    """The gated delta rule position by position (arXiv 2412.06464, eq. 10), in place of transformers', which is in fp32
    whatever the type; query and key [1, T, H, d], value [1, T, H, e], g and beta [1, T, H] → [1, T, H, e].
    """
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    state = torch.zeros(*key.shape[2:], value.shape[-1]).to(key)  # [H, d, e]
    out = []
    for t in range(query.shape[1]):
        q, k, v, decay, rate = (x[0, t, :, None] for x in (query, key, value, g.exp(), beta))
        state = decay[..., None] * state
        state = state + k.mT @ (rate[..., None] * (v - k @ state))
        out.append(q @ state * q.shape[-1] ** -0.5)
    return torch.stack(out)[None, :, :, 0], None


# ---------------------------------------------------------------- comparisons


def relative(found, wanted) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def worst_gradient(found, wanted) -> tuple[float, str]:
    return max((relative(found[name], wanted[name]), name) for name in wanted if name.startswith("grad."))
