"""A reference that a fork moves on purpose, algo.moving_reference."""

import torch

from oracle import formulas
from oracle.state import OF_UPDATE


def follow_reference(state, answers, first):
    """Go on with the reference that the run has in this step: the one so far, or else the weights before the step.

    `kl/ref`, of the answers `first` of the first update, decides which. Where neither has it, what depends on the
    reference is not judged.
    """
    cfg = state.cfg
    trainer = state.trainer
    if state.doubt or not (cfg.algo.moving_reference and first):
        return
    trainer.score(answers, "before")

    problem = misfit(state, first)
    if not problem:
        return
    trainer.score(answers, "ref")
    if misfit(state, first):
        state.report.say("reference", f"kl/ref: {problem}")
        return state.lose("the reference is neither the one before nor the present weights", OF_UPDATE)
    trainer.reference = {name: weight.clone() for name, weight in trainer.current().items()}
    state.report.say("reference", f"it is now the weights before this step; with the one so far kl/ref: {problem}")


def misfit(state, answers):
    """How the run's kl/ref differs from that of these answers, in words; empty if it agrees."""
    before, ref = [torch.cat([getattr(a, name) for a in answers]) for name in ("before", "ref")]
    return state.report.compare("kl/ref", state.metrics["kl/ref"], formulas.kl(before, ref, "k3").mean()).parts
