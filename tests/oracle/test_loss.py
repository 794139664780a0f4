"""The script's loss on synthetic answers that reach its branches, against the formulas of the second trainer."""

import itertools
from dataclasses import replace

import pytest
import torch

import train_grpo
from grpo.step.packing import pack
from grpo.step.records import Sample
from oracle import formulas
from tests.conftest import tiny_config

LENGTHS = (4, 3, 6, 5, 2, 6, 1, 4, 5)  # of the answers, three to a group; the longest are truncated
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.0, 2.0, 1.0)
# Differences of log-probs: of a whole answer and, added to it, of its tokens in turn.
OF_ANSWERS = (0.0, 0.3, -0.3, 0.015, 0.75, -0.75, 0.1, -0.1, 0.45)
POLICY = (0.003, 0.11, -0.13, 2.6, -2.4)  # policy - old
SAMPLER = (0.0002, 0.7, -0.6, 2.1, -1.9)  # old - vLLM
REFERENCE = (0.05, -0.4, 1.7, -2.2)  # reference - old
EXTREME = 11.0  # times these differences: beyond the clamps of exponents


def moved(logp_F, batch, of_tokens, times):
    """The log-probs where the mask is 1, moved by `times` the differences; [F]."""
    token_F = torch.tensor(of_tokens)[torch.arange(len(logp_F)) % len(of_tokens)]
    return logp_F + times * (torch.tensor(OF_ANSWERS)[batch.seq_id] + token_F) * batch.mask


def make_batch(cfg):
    """Nine answers with their advantages and weights."""
    samples = []
    for number, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        logp = [-0.4 - 0.3 * i for i in range(length)]
        sample = Sample(number // 3, [1, 2 + number // 3], [10 + number] * length, logp, length < 6, "", "")
        samples.append(replace(sample, reward=reward, reward_parts={"reward": reward}))

    batch = train_grpo.flatten(samples, cfg.algo.mask_truncated)
    batch = replace(batch, old_logp=batch.rollout_logp, ref_logp=batch.rollout_logp - 0.1)
    batch = train_grpo.add_advantages(samples, batch, cfg.algo, cfg.reward)
    return replace(batch, weights=train_grpo.loss_weights(batch, [*range(9)], cfg.algo.loss_norm, cfg.norm_length))


PAIRS = [
    pytest.param(loss, correction, marks=[] if "ppo_clip" in loss or correction == "none" else pytest.mark.slow)
    for loss, correction in itertools.product(formulas.LOSSES, formulas.BOUNDS)
]


@pytest.mark.parametrize(("loss", "correction"), PAIRS)
def test_value_gradients_and_clips_of_every_loss(loss, correction):
    others = [
        (), ("algo.kl=k1", "algo.advantage=max_rl"), ("algo.kl=k2", "algo.dual_clip=1.1", "algo.advantage=grpo_loo"),
        ("algo.kl=k3+", "algo.kl_in=reward", "algo.advantage=dr_grpo"), ("algo.loss_norm=seq_mean_token_sum",),
        ("algo.correction_low=0.5", "algo.correction_high=2"), ("algo.clip_low=0.01", "algo.clip_high=0.01"),
    ]  # fmt: skip
    if correction in ("tis", "icepop"):
        others.append(("algo.correction_level=sequence", "algo.correction_high=1.07"))
    if correction == "none":
        others.append(("algo.old_logp=rollout",))

    for keys in others:
        cfg = tiny_config(f"algo.loss={loss}", f"algo.correction={correction}", "algo.kl_coef=1.0", *keys)
        batch = make_batch(cfg)
        # Small differences, then such that the clamps of exponents hold, where the loss itself has no precision.
        for times in (1.0, EXTREME):
            old_F = moved(batch.rollout_logp, batch, SAMPLER, times)
            old_F = torch.where(batch.seq_id == 0, batch.rollout_logp + 2e-4 * batch.mask, old_F)  # weights of about 1
            row = replace(batch, old_logp=old_F, ref_logp=moved(old_F, batch, REFERENCE, times))
            mb = pack(row, [*range(9)], len(batch.tokens), "cpu")
            logp_T = moved(old_F, batch, POLICY, times)
            for given in (mb, replace(mb, old_logp=None)):
                compare(given, logp_T, cfg.algo, has_value=times == 1)


def compare(mb, logp_T, algo, has_value):
    """The loss, if it `has_value`, its gradients and what its report counts, against float64."""
    inputs = [logp_T.clone().requires_grad_(), (0.3 - 0.1 * logp_T).requires_grad_()]  # log-probs and entropies
    loss, tokens, report = train_grpo.grpo_loss(mb, *inputs, algo)
    gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)

    exact = [values_T.detach().double().requires_grad_() for values_T in inputs]
    formula, clipped, outside = row_loss(mb, *exact, algo)
    exact_gradients = torch.autograd.grad(formula, exact, materialize_grads=True)

    close = {"rtol": 3e-4, "atol": 1e-5}
    for found, wanted in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(found.double(), wanted, **close)
    assert (tokens, report["clipped"], report["outside"]) == (mb.weights.count_nonzero(), clipped, outside)
    if has_value:
        torch.testing.assert_close(loss.double(), formula, **close)


def row_loss(mb, logp_T, entropy_T, algo):
    """[3] float64 of a row: its loss sum, how many tokens are clipped, how many out of the correction's bounds."""
    old_T = logp_T.detach() if mb.old_logp is None else mb.old_logp[0]
    columns = (logp_T, old_T, mb.ref_logp[0], mb.rollout_logp[0], mb.advantages[0], mb.weights[0], entropy_T)
    total = torch.zeros(3, dtype=torch.float64)
    for number in mb.sequence_T.unique():
        sampled_T = mb.mask[0] & (mb.sequence_T == number)
        answer = (column_T[sampled_T].double() for column_T in columns)
        total = total + formulas.answer_loss(*answer, algo)[[0, 2, 3]].sum(1)
    return total
