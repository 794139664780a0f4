"""Rollout routing replay (R3): the trainer's routers choose the experts that vLLM chose when it sampled.

Source: Ma et al. (2025), arXiv 2510.11370. Only the choice is replayed. The weight of each expert comes from the
trainer's own logits of all experts, so the router has a gradient. A row of tokens has a route as k numbers, each an
expert's number plus 1. 0 means no route: the router chooses by itself, as in padding.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from config import TrainingError
from grpo.parts.base.ranks import device, to_device
from grpo.parts.model.attention import own_stripe  # before Megatron-core

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model


@dataclass(frozen=True)
class Routes:
    """The routes of a batch, [F, layers, k], or of a micro-batch, [1, T, layers, k]; 0 is no route, else expert + 1."""

    experts: torch.Tensor  # uint8 or int16

    @classmethod
    def concatenate(cls, routes: list[np.ndarray], lengths_N):
        """Of a batch, from each sample's [tokens, layers, k], experts as vLLM numbers them, and number of positions.

        vLLM returns routes for every token but the last, which are the sample's positions. Where it returns fewer (an
        engine may not keep those of a cached prompt), they belong to the last positions, and the first have no route.
        Raises TrainingError for more routes than positions, and for a route whose first two experts are one.
        """
        largest = max(int(each.max(initial=0)) for each in routes)
        experts = np.zeros((lengths_N.sum(), *routes[0].shape[1:]), np.uint8 if largest < 255 else np.int16)
        for each, length, end in zip(routes, lengths_N, np.cumsum(lengths_N), strict=True):
            if len(each) > length:
                raise TrainingError(f"vLLM returned routes for {len(each)} tokens of a sample of {length} that predict")
            if each.shape[2] > 1 and (each[..., 0] == each[..., 1]).any():
                raise TrainingError(
                    "vLLM returned a route with one expert twice: it did not note where each token went"
                )
            experts[end - len(each) : end] = each.astype(experts.dtype) + 1
        return cls(torch.from_numpy(experts))

    @staticmethod
    def join(before, routes):
        """Of a conversation: with its last turn vLLM returns the routes of all tokens up to there."""
        return routes

    def take(self, samples: list[int], index_F) -> "Routes":
        return Routes(self.experts[index_F])

    def row(self, samples: list[int], index_T, padding, device) -> "Routes":
        experts = self.experts[index_T]
        padded = torch.cat([experts, experts.new_zeros(padding, *experts.shape[1:])])
        return Routes(to_device(padded[None], device))

    def of_positions(self):
        """What a prompt's positions hold: prompts that took other routes are not the same."""
        return (self.experts,)

    def for_other_weights(self):
        """No routes: other weights' routers choose for themselves."""
        return Routes(torch.zeros_like(self.experts))


class Replay:
    """The routes that one router replays. Megatron's top-k calls `get_replay_topk` of a router's `router_replay`.

    A forward pass in training that has no gradients is one that activation recompute will repeat, so its routes are
    queued for the repetition. All schedules run backward passes in the order of the forward passes. Why not Megatron's
    own RouterReplay: docs/dev/field-notes.md.
    """

    def __init__(self):
        self.routes = None  # [tokens, k], of the present micro-batch, by set_routes
        self.training = False
        self.to_recompute = deque()  # routes of micro-batches that recompute will repeat
        self.counts = 0  # [2], routes replayed in training, and those that the router did not choose

    def get_replay_topk(self, scores, k, num_groups, group_topk, choose):
        """scores of all experts [tokens, E] → the scores and numbers of the k experts of each token, [tokens, k] each.

        `choose` is Megatron's own top-k. If it chooses the same experts, its order is kept, so results are bit-equal.
        """
        _, own = choose(scores, k, num_groups, group_topk)

        # The routes of the micro-batch that this pass computes, for the first time or again.
        routes = self.routes
        if torch.is_grad_enabled():
            routes = self.to_recompute.popleft() if self.to_recompute else routes
        elif self.training:
            self.to_recompute.append(routes)

        is_replayed = routes[:, :1] > 0  # [tokens, 1]
        theirs = routes.long() - 1
        differs = is_replayed & (own.sort(-1).values != theirs.sort(-1).values).any(-1, keepdim=True)
        if torch.is_grad_enabled():  # counts each token once, with recompute or without
            self.counts = self.counts + torch.stack([is_replayed.sum(), differs.sum()])
        experts = torch.where(differs, theirs, own)
        return scores.gather(-1, experts), experts


def routers(chunk):
    """The routers of a model chunk, layer by layer; [] without experts."""
    return [layer.mlp.router for layer in unwrap_model(chunk).decoder.layers if hasattr(layer.mlp, "router")]


def set_routes(chunk, mb):
    """Give the chunk's routers this rank's part of the routes of `mb`, before it enters the chunk."""
    experts = mb.replay["routes"].experts[0]  # [T, layers, k]
    routes = own_stripe(mb.computed(experts.movedim(0, -1)))  # [layers, k, C / cp]
    if chunk.config.sequence_parallel:
        group = mpu.get_tensor_model_parallel_group()
        routes = routes.chunk(group.size(), dim=-1)[group.rank()]
    routes = routes.movedim(-1, 1)  # [layers, tokens, k]

    for router in routers(chunk):
        replay = router.router_replay = router.router_replay or Replay()
        replay.routes = routes[router.layer_number - 1]
        replay.training = chunk.training


def reduce_counts(model: list):
    """The counts of the update just computed, over all ranks and layers, which then start at 0. All ranks call this.

    "routes" were replayed. "routes_differ" of these are not what the trainer's router chose.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=device())
    for router in [router for chunk in model for router in routers(chunk)]:
        replay = router.router_replay
        if replay.to_recompute:
            raise RuntimeError("routes were queued for activation recompute, which did not run")
        counts += replay.counts
        replay.counts = 0
    dist.all_reduce(counts)  # each rank counts its own tokens and layers
    replayed, differ = counts.tolist()
    return {"routes": replayed, "routes_differ": differ}
