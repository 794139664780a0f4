"""The rehearsal before a start: the algorithm on synthetic answers that reach its branches, against its formulas."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from config import AlgoConfig, Config, RewardConfig, UserError
from support.base import ranks
from support.base.read_config import override
from support.base.require import require
from support.proof import formulas, rows
from support.step.packing import pack
from support.step.records import Batch, MicroBatch, Sample

SMALL = {"rollout.group_size": 3, "rollout.max_new_tokens": 6, "algo.max_rounds": 1, "algo.kl_coef": 1.0}
LENGTHS = (4, 3, 6, 5, 2, 6, 1, 4, 5)  # of the answers, of three to a group; those of the largest are truncated
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.0, 2.0, 1.0)
# Differences of log-probs: those of a whole answer and, added, those that its tokens take turns in.
OF_ANSWERS = (0.0, 0.3, -0.3, 0.015, 0.75, -0.75, 0.1, -0.1, 0.45)
POLICY = (0.003, 0.11, -0.13, 2.6, -2.4)  # policy - old
SAMPLER = (0.0002, 0.7, -0.6, 2.1, -1.9)  # old - vLLM
REFERENCE = (0.05, -0.4, 1.7, -2.2)  # reference - old
# Part of the loss → keys without which it has no such part
PARTS = {
    "the KL": {"kl_in": "reward"}, "the entropy": {"entropy_coef": 0.0}, "the correction": {"correction": "none"},
    "ratio and clip": {"loss": "reinforce"},
}  # fmt: skip
EXTREME = 11.0  # times these differences: beyond the clamps of exponents
COURSES = {
    "train.steps": 5, "train.warmup_steps": 2, "train.lr": 0.008, "schedule.lr": {"shape": "cosine"},
    "algo.kl_coef": 0.08, "schedule.kl_coef": {"to": 0.04, "steps": 3},
}  # fmt: skip
# Step → learning rate and KL coefficient of COURSES by hand; step 1 is half of the warm-up.
BY_HAND = {1: (0.004, 0.08), 2: (0.004 + 0.004 * 0.5**0.5, 0.06), 3: (0.004, 0.04), 5: (0.0, 0.04)}


def run(
    cfg: Config, config_at: Callable, penalize_length: Callable, flatten: Callable, add_advantages: Callable,
    loss_weights: Callable, grpo_loss: Callable,
) -> None:  # fmt: skip
    """Run the functions of the script that have these names. Raises UserError, TrainingError."""
    require(
        cfg.algo.kl_coef > 0 or config_at(cfg, cfg.train.steps).algo.kl_coef == 0,
        "algo.kl_coef=0 keeps no reference model, but config_at raises it; start above 0",
    )
    courses = override(cfg.model_copy(update={"schedule": type(cfg.schedule)()}), COURSES)
    for step, (lr, kl_coef) in BY_HAND.items():
        used = config_at(courses, step)
        for name, found, wanted in (("lr", used.train.lr, lr), ("kl_coef", used.algo.kl_coef, kl_coef)):
            require(
                math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-12),
                f"config_at gives {name}={found:g} in place of {wanted:g} at step {step} of 5, where it has the course "
                f"{COURSES[f'schedule.{name}']}, and lr a warm-up of 2 steps: does a schedule or the warm-up begin or "
                "end elsewhere? A course of your own needs a shape of its own; another warm-up goes into BY_HAND of "
                "support/proof/rehearsal.py as well",
            )
    cfg = config_at(cfg, 1).model_copy(update={"reward": RewardConfig()})  # of one part
    cfg = override(cfg, SMALL | {"algo.overlong_buffer": min(cfg.algo.overlong_buffer, 4)})
    algo = cfg.algo
    samples = make_samples(cfg)
    if algo.overlong_buffer:
        penalize_length(samples, algo, cfg.rollout.max_new_tokens)
    rows.check_samples(samples, cfg)
    batch = add_logprobs(flatten(samples, algo.mask_truncated))
    batch = add_advantages(samples, batch, algo, cfg.reward)
    rows.check_credit(samples, batch, cfg)
    everyone = list(range(len(samples)))
    batch = replace(batch, weights=loss_weights(batch, everyone, algo.loss_norm, cfg.norm_length))
    if not formulas.has_formula(algo) and ranks.is_first_rank():
        print(f"algo.loss={algo.loss}, algo.kl={algo.kl}: the loss is a fork's own and not judged by a formula")
    for times in (1.0, EXTREME):
        mb = pack(add_logprobs(batch, times), everyone, len(batch.tokens), "cpu")
        logp_T = moved(mb.old_logp[0], batch, POLICY, times)
        for row in (mb, replace(mb, old_logp=None)):
            check_loss(partial(difference, grpo_loss, row, logp_T, has_value=times == 1), algo)


def make_samples(cfg: Config) -> list[Sample]:
    """Nine answers, with rewards of one part."""
    samples = []
    for number, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        group = number // 3
        logp = [-0.4 - 0.3 * i for i in range(length)]
        finished = length < cfg.rollout.max_new_tokens
        sample = Sample(group, [1, 2 + group], [10 + number] * length, logp, finished, "", "", reward=reward)
        raw = {cfg.reward.default: {"reward": reward}}
        samples.append(replace(sample, reward_parts={"reward": reward}, raw=raw))
    return samples


def moved(logp_F: Tensor, batch: Batch, of_tokens: tuple, times: float) -> Tensor:
    """The log-probs where the mask is 1, moved by so many times the differences; [F]."""
    token_F = torch.tensor(of_tokens)[torch.arange(len(logp_F)) % len(of_tokens)]
    return logp_F + times * (torch.tensor(OF_ANSWERS)[batch.seq_id] + token_F) * batch.mask


def add_logprobs(batch: Batch, times: float = 1.0) -> Batch:
    """The batch with log-probs of an old policy and a reference unlike vLLM's; a teacher has those of the old one."""
    old_F = moved(batch.rollout_logp, batch, SAMPLER, times)
    old_F = torch.where(batch.seq_id == 0, batch.rollout_logp + 2e-4 * batch.mask, old_F)  # where weights are about 1
    return replace(batch, old_logp=old_F, ref_logp=moved(old_F, batch, REFERENCE, times), teacher_logp=old_F)


def check_loss(compare: Callable[[AlgoConfig], str], algo: AlgoConfig) -> None:
    """Raise UserError where `compare` finds a difference, with the parts of the loss without which there is none."""
    found = compare(algo)
    if found:
        parts = [what for what, keys in PARTS.items() if not compare(algo.model_copy(update=keys))]
        where = f", which it does not without {' or without '.join(parts)}" if parts else ""
        raise UserError(
            f"{found}: with algo.loss={algo.loss}, algo.correction={algo.correction}, algo.kl={algo.kl} grpo_loss "
            f"computes something else{where}{rows.OWN_NAME}"
        )


def difference(grpo_loss: Callable, mb: MicroBatch, logp_T: Tensor, algo: AlgoConfig, has_value: bool) -> str:
    """What grpo_loss, if it `has_value`, or its gradients have otherwise than their formula; "" if nothing."""
    inputs = [logp_T.clone().requires_grad_(), (0.3 - 0.1 * logp_T).requires_grad_()]  # log-probs and entropies
    loss, tokens, report = grpo_loss(mb, *inputs, algo)
    loss = loss + 0 * inputs[0].sum()  # one that is detached has a gradient of 0
    found = {"the gradient": torch.stack(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))}
    if not formulas.has_formula(algo):  # a fork's own: it runs, and has a gradient
        return ""
    inputs = [values_T.detach().double().requires_grad_() for values_T in inputs]
    formula, clipped, outside = formulas.row_loss(mb, *inputs, algo)
    wanted = torch.autograd.grad(formula, inputs, allow_unused=True, materialize_grads=True)
    wanted = {"the gradient": torch.stack(wanted)}
    found |= {"trained": tokens, "clipped": report["clipped"], "outside": report["outside"]}
    wanted |= {"trained": mb.weights.count_nonzero(), "clipped": clipped, "outside": outside}
    if has_value:
        found["loss"], wanted["loss"] = loss, formula
    for name, values in found.items():
        own, right = values.double().flatten(), wanted[name].double().flatten()
        wrong = ~torch.isclose(own, right, rtol=3e-4, atol=1e-5)
        if wrong.any():
            return f"on synthetic answers {name} is {own[wrong][0]:.6g}, by its formula {right[wrong][0]:.6g}"
    return ""
