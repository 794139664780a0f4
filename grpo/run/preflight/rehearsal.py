"""The rehearsal at every start: small calls of advantages and loss, so that a fork's slip shows within seconds."""

import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch

from config import AlgoConfig, RewardConfig, UserError
from grpo.parts.base.require import require
from grpo.step.packing import pack
from grpo.step.records import Batch, Sample

ANSWERS = ((4, 1.0), (3, 0.0), (6, 0.25), (5, 0.5), (2, 0.5), (1, 0.5))  # (tokens, reward), three to a group


def run(cfg, flatten: Callable, add_advantages: Callable, loss_weights: Callable, grpo_loss: Callable):
    """Call the script's functions of these names.

    Raises UserError if one of them raises, with its line, if `grpo_loss` returns values of another shape, or if what it
    returns for all answers is not the sum of what it returns for some of them and for the others.
    """
    algo = cfg.algo
    samples = []
    for number, (length, reward) in enumerate(ANSWERS):
        answer = ([number] * length, [-0.5] * length, length < 6, "", "")
        samples.append(Sample(number // 3, [1, 2], *answer, reward=reward, reward_parts={"reward": reward}))
    everyone = list(range(len(samples)))

    try:
        batch = flatten(samples, algo.mask_truncated)
        # Log-probs, and fields of a fork, which later functions would fill.
        unset = {name for name, value in vars(batch).items() if value is None}
        batch = replace(batch, **dict.fromkeys(unset, batch.rollout_logp))
        batch = add_advantages(samples, batch, algo, RewardConfig())
        batch = replace(batch, weights=loss_weights(batch, everyone, algo.loss_norm, cfg.norm_length))

        whole, again, evens, odds = [
            loss_of(batch, numbers, grpo_loss, algo) for numbers in (everyone, everyone, everyone[::2], everyone[1::2])
        ]
        wrong = {name: [*value.shape] for name, value in whole.items() if value.shape}
    except UserError:
        raise
    except Exception as error:
        where = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == flatten.__code__.co_filename:
                where = f"{frame.filename}, line {frame.lineno}, in {frame.name}: "
        raise UserError(f"{where}{type(error).__name__}: {error} (tried on six synthetic answers)") from error

    require(not wrong, f"grpo_loss returns the shapes {wrong}; each must be one number, a sum over the tokens")
    if not all(are_close(whole[name], again[name]) for name in (LOSS, TOKENS)):
        return  # it draws random numbers, so two calls say nothing of each other
    for name in (TOKENS, LOSS):
        require(
            are_close(whole[name], evens[name], odds[name]),
            f"{place_of(grpo_loss)}{name} of six synthetic answers is {whole[name]:g} in one micro-batch, but "
            f"{evens[name]:g} + {odds[name]:g} in two. Return the sum over the tokens and their number: use .sum() for "
            ".mean(), and divide by no number of tokens, answers or micro-batches, since Megatron divides once. What "
            "needs the whole batch belongs in train_step",
        )


LOSS = "the loss sum"
TOKENS = "the number of tokens"


def loss_of(batch: Batch, numbers: list[int], grpo_loss: Callable, algo: AlgoConfig) -> dict[str, torch.Tensor]:
    """What `grpo_loss` returns for the numbered answers in one micro-batch, by name. Log-probs have moved since they
    were sampled, some of them out of the clip's range.
    """
    mb = pack(batch, numbers, int(batch.lengths_N[numbers].sum()), "cpu")
    moved_T = 0.1 * (mb.tokens[0] - 2) - 0.1 * mb.position_ids[0]
    logp_T = (mb.rollout_logp[0] + moved_T * mb.mask[0]).requires_grad_()
    loss, tokens, report = grpo_loss(mb, logp_T, -logp_T, algo)
    return {LOSS: loss, TOKENS: tokens, **report}


def are_close(value, *parts) -> bool:
    """Whether a sum differs from that of its parts, which may cancel, by no more than rounding."""
    size = 1 + sum(part.double().abs() for part in parts)
    return bool((value.double() - sum(part.double() for part in parts)).abs() <= 1e-5 * size)


def place_of(function) -> str:
    """Where a function is, in words; empty for what is no plain function, such as a partial one."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}, in {code.co_name}: " if code else ""
