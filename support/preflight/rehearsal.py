"""The rehearsal of a start: one small call of advantages and loss, so that a fork's slip shows within seconds."""

import traceback
from collections.abc import Callable
from dataclasses import fields, replace

from config import Config, RewardConfig, UserError
from support.base.require import require
from support.step.packing import pack
from support.step.records import Batch, Sample

ANSWERS = ((4, 1.0), (3, 0.0), (6, 0.25), (5, 0.5), (2, 0.5), (1, 0.5))  # (tokens, reward), of three to a group


def run(cfg: Config, flatten: Callable, add_advantages: Callable, loss_weights: Callable, grpo_loss: Callable) -> None:
    """Call the script's functions of these names. UserError where one raises, with its line, or in another shape."""
    algo, everyone, samples = cfg.algo, [*range(len(ANSWERS))], []
    for number, (length, reward) in enumerate(ANSWERS):
        answer = ([10 + number] * length, [-0.5] * length, length < 6, "", "")
        samples.append(Sample(number // 3, [1, 2], *answer, reward=reward, reward_parts={"reward": reward}))
    try:
        batch = flatten(samples, algo.mask_truncated)
        unset = {field.name for field in fields(Batch) if getattr(batch, field.name) is None} - {"routes"}
        batch = replace(batch, **dict.fromkeys(unset, batch.rollout_logp))  # log-probs, and fields of a fork
        batch = add_advantages(samples, batch, algo, RewardConfig())
        batch = replace(batch, weights=loss_weights(batch, everyone, algo.loss_norm, cfg.norm_length))
        mb = pack(batch, everyone, len(batch.tokens), "cpu")
        logp_T = mb.rollout_logp[0].clone().requires_grad_()
        loss, tokens, report = grpo_loss(mb, logp_T, -logp_T, algo)
        shapes = {"the loss sum": loss.shape, "the number of tokens": tokens.shape}
        shapes |= {f"report[{name!r}]": value.shape for name, value in report.items()}
    except UserError:
        raise
    except Exception as error:
        script = flatten.__code__.co_filename
        at = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        where = f"{script}, line {at[-1].lineno}, in {at[-1].name}: " if at else ""
        raise UserError(f"{where}{type(error).__name__}: {error} (tried on six synthetic answers)") from error
    wrong = [f"{name} in the shape {[*shape]}" for name, shape in shapes.items() if shape]
    require(not wrong, f"grpo_loss returns {', '.join(wrong)}; legal is a tensor of one number: a sum over the tokens")
