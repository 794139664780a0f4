"""The rehearsal at every start: one small call of advantages and loss, so that a fork's slip shows within seconds."""

import traceback
from collections.abc import Callable
from dataclasses import replace

from config import RewardConfig, UserError
from grpo.parts.base.require import require
from grpo.step.packing import pack
from grpo.step.records import Sample

ANSWERS = ((4, 1.0), (3, 0.0), (6, 0.25), (5, 0.5), (2, 0.5), (1, 0.5))  # (tokens, reward), three to a group


def run(cfg, flatten: Callable, add_advantages: Callable, loss_weights: Callable, grpo_loss: Callable):
    """Call the script's functions of these names.

    Raises UserError if one of them raises, with its line, or if `grpo_loss` returns values of another shape.
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

        mb = pack(batch, everyone, len(batch.tokens), "cpu")
        logp_T = mb.rollout_logp[0].clone().requires_grad_()
        loss, tokens, report = grpo_loss(mb, logp_T, -logp_T, algo)
        returned = {"the loss sum": loss, "the number of tokens": tokens, **report}
        wrong = {name: [*value.shape] for name, value in returned.items() if value.shape}
    except UserError:
        raise
    except Exception as error:
        where = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == flatten.__code__.co_filename:
                where = f"{frame.filename}, line {frame.lineno}, in {frame.name}: "
        raise UserError(f"{where}{type(error).__name__}: {error} (tried on six synthetic answers)") from error

    require(not wrong, f"grpo_loss returns the shapes {wrong}; each must be one number, a sum over the tokens")
