"""Further sets of a model's weights beside the present ones: the reference, and past ones (rollout.lag).

A set is what `bridge.copy_weights` gives, all weights of this rank, under a name:

    reference   the initial model, or the weights of the last multiple of algo.reference_every steps
    past_1 ...  the weights of 1, 2, ... rollout.lag steps before the present ones; vLLM samples with the last of them

A checkpoint has those that cannot be had otherwise (optimizer_state.select_saved), so that a resumed run goes on with
the same bits.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import megatron_bridge as bridge
from config import Config, UserError
from support.optimizer_state import Sets, trainable_weights


def initial_sets(model: list, cfg: Config) -> Sets:
    """All sets that a run has, as copies of the model's weights, where algo.reference_on says."""
    names = ["reference"] * (cfg.algo.kl_coef > 0) + [f"past_{n}" for n in range(1, cfg.rollout.lag + 1)]
    return {name: bridge.copy_weights(model, cfg.algo.reference_on) for name in names}


def sampling_weights(sets: Sets) -> list[torch.Tensor] | None:
    """The weights that vLLM samples with: the oldest past set, None for the present weights."""
    return sets.get(f"past_{sum(name.startswith('past_') for name in sets)}")


def move_sets(sets: Sets, model: list, step: int, cfg: Config) -> None:
    """Let all past sets be a step older, and take over the present weights where it is time.

    Called between sampling, which a stop may give up, and the updates of `step`; the last push has gathered the weights
    that megatron.overlap_param_gather leaves spread."""
    lag, every = cfg.rollout.lag, cfg.algo.reference_every
    taken = [sets["reference"]] if every and (step - 1) % every == 0 else []
    if lag:
        oldest = sets.pop(f"past_{lag}")
        for n in range(lag - 1, 0, -1):
            sets[f"past_{n + 1}"] = sets.pop(f"past_{n}")
        sets["past_1"] = oldest  # its memory, for the present ones
        taken.append(oldest)
    own = [weight.detach() for weight in trainable_weights(model)]
    for weights in taken:
        for kept, weight in zip(weights, own, strict=True):
            kept.copy_(weight)


@contextlib.contextmanager
def present_weights(sets: Sets, sleep: Callable[[], None], push: Callable[[], None]) -> Iterator[None]:
    """Let vLLM have the present weights inside the block: by a push before it and one after it, if it samples with past
    ones."""
    past = {name: sets.pop(name) for name in list(sets) if name.startswith("past_")}
    if past:
        sleep()  # so that a push finds the memory it counts on
        push()
    yield
    sets.update(past)
    if past:
        sleep()
        push()


def check_resumed(was: dict[str, Any], cfg: Config, path: Path) -> None:
    """See that a checkpoint in `path`, of a run with the configuration `was`, has the sets that `cfg` needs. Raises
    UserError."""
    lag, every = was["rollout"].get("lag", 0), was["algo"].get("reference_every", 0)
    if cfg.rollout.lag > lag:
        raise UserError(
            f"rollout.lag={cfg.rollout.lag}, but {path} has no weights of more than {lag} steps before it; legal are "
            f"0 to {lag}"
        )
    if every and cfg.algo.kl_coef > 0 and not cfg.algo.reference_every:
        raise UserError(
            f"algo.reference_every=0, but the reference in {path} is no longer the initial model, and without "
            f"reference_every the next checkpoint would not have it; use {every}, or more than train.steps to keep it"
        )
