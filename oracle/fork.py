"""The checkout's own token weights and loss, on log-probs of plain transformers, an answer at a time.

They are asked where a run parts from the formulas: what a fork did not touch can still be judged then.
"""

from dataclasses import replace

import torch
from torch import Tensor

import train_grpo
from config import Config
from grpo.step.packing import pack
from grpo.step.records import Sample
from oracle.trainer import Loss, Scored
from rollout import Trace

FIELDS = ("group", "prompt_ids", "response_ids", "rollout_logp", "finished", "text", "source")


def sample_of(a: Scored) -> Sample:
    """The Sample of an answer."""
    return Sample(**{name: a.row[name] for name in FIELDS}, trace=Trace(turns=a.row["turns"]))


def positions_of(a: Scored) -> Tensor:
    """The positions, in an answer's row, that predict the tokens that the model sampled."""
    return torch.tensor(a.sampled) + len(a.row["prompt_ids"]) - 1


def own_weights(answers: list[Scored], chosen: list[int], cfg: Config) -> list[Tensor]:
    """The weight of each token that the model sampled, of the `chosen` answers of a step in an update on these."""
    batch = train_grpo.flatten([sample_of(a) for a in answers], cfg.algo.mask_truncated)
    weights_F = train_grpo.loss_weights(batch, chosen, cfg.algo.loss_norm, cfg.norm_length)
    return [weights_F[int(batch.starts_N[n]) + positions_of(answers[n])] for n in chosen]


def own_loss(cfg: Config, step: int) -> Loss:
    """The loss as grpo_loss computes it with the configuration of a step."""
    algo = train_grpo.config_at(cfg, step).algo

    def loss(a: Scored, weight: Tensor, logp: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        batch = train_grpo.flatten([sample_of(a)], algo.mask_truncated)
        size, at = len(batch.tokens), positions_of(a)

        def spread(values: Tensor | None) -> Tensor | None:
            return None if values is None else torch.zeros(size).index_put((at,), values.float())

        values = {"advantages": a.advantages, "weights": weight, "old_logp": a.old, "ref_logp": a.ref}
        batch = replace(batch, **{name: spread(value) for name, value in values.items()})
        found, _, report = train_grpo.grpo_loss(pack(batch, [0], size, "cpu"), spread(logp), spread(entropy), algo)
        return found.double(), {name: report[name] for name in ("policy", "clipped", "outside")}

    return loss
