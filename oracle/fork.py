"""The checkout's own loss, on log-probs of plain transformers, an answer at a time.

It is called where a run parts from the formulas, so that what a fork did not touch can still be compared.
"""

from dataclasses import replace

import torch

import train_grpo
from grpo.step.packing import pack
from grpo.step.records import Sample
from rollout import Trace

FIELDS = ("group", "prompt_ids", "response_ids", "rollout_logp", "finished", "text", "source")


def own_loss(algo):
    """The loss, for Trainer.gradient, as grpo_loss computes it."""

    def loss(a, logp, entropy, divergences):
        sample = Sample(**{name: a.row[name] for name in FIELDS}, trace=Trace(turns=a.row["turns"]))
        batch = train_grpo.flatten([sample], algo.mask_truncated)
        size = len(batch.tokens)
        places = torch.tensor(a.sampled) + len(a.row["prompt_ids"]) - 1  # that predict what the model sampled

        def spread(values):
            return None if values is None else torch.zeros(size).index_put((places,), values.float())

        batch = replace(
            batch,
            advantages=spread(a.token_advantages),
            weights=spread(a.weights),
            old_logp=spread(a.old),
            ref_logp=spread(a.ref),
        )
        row = pack(batch, [0], size, "cpu")
        row = replace(row, **{name: spread(values)[None] for name, values in divergences.items()})
        found, _, report = train_grpo.grpo_loss(row, spread(logp), spread(entropy), algo)
        return found.double(), {name: report[name] for name in ("policy", "clipped")}

    return loss
