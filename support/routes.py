"""Routes through a mixture of experts, from vLLM to the trainer: the experts that each token went to as it was sampled
are replayed wherever the trainer computes the policy's log-probs, so both sides run through the same weights.

Rollout routing replay (R3): Ma et al. (2025), arXiv 2510.11370. Only the choice is replayed: what each expert counts
comes from the trainer's own logits of all experts, so the router's gradient lives. A row of tokens holds each route as
k numbers, one above the expert's; 0 says that there is none, and the router chooses by itself, as in padding.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from config import TrainingError
from support.attention import own_stripe  # before Megatron-core
from support.records import Sample

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model

# ---------------------------------------------------------------- from samples to rows


def route_rows(samples: list[Sample], lengths_N: np.ndarray) -> torch.Tensor:
    """The samples' routes end to end, [F, layers, k] uint8 or int16.

    `samples`: with `routes` [tokens, layers, k], the experts as vLLM numbers them; `lengths_N`: their positions. vLLM
    routes every token but the last, which is what predicts. Where it returns fewer (an engine may forget those of a
    cached prompt), they are the last ones, and the others have none. Raises TrainingError for what no router can do.
    """
    routes_N = [np.asarray(s.routes) for s in samples]
    largest = max(int(routes.max(initial=0)) for routes in routes_N)
    rows_F = np.zeros((lengths_N.sum(), *routes_N[0].shape[1:]), np.uint8 if largest < 255 else np.int16)
    for routes, length, end in zip(routes_N, lengths_N, np.cumsum(lengths_N), strict=True):
        if len(routes) > length:
            raise TrainingError(f"vLLM returned routes for {len(routes)} tokens of a sample of {length} that predict")
        if routes.shape[2] > 1 and (routes[..., 0] == routes[..., 1]).any():
            raise TrainingError("vLLM returned a route with one expert twice: it did not note where each token went")
        rows_F[end - len(routes) : end] = routes.astype(rows_F.dtype) + 1
    return torch.from_numpy(rows_F)


# ---------------------------------------------------------------- in Megatron's routers


class Replay:
    """The routes that one router is given. Megatron's top-k asks `get_replay_topk` of a router's `router_replay`.

    Not Megatron's own RouterReplay, which has to be told before each backward pass that it comes; a pipeline's schedule
    mixes them with forward passes. Here a forward pass without gradients in training is one that recompute will do
    again, and its routes wait for that. The backward passes of every schedule come in the order of the forward passes.
    """

    def __init__(self):
        self.given: torch.Tensor | None = None  # [tokens, k], of the micro-batch on its way; None: the router chooses
        self.training = False
        self.waiting: deque[torch.Tensor] = deque()  # of the micro-batches that recompute will do again
        self.counts: torch.Tensor | int = 0  # [2], routes replayed in training; those the router would not have taken

    def get_replay_topk(
        self, scores: torch.Tensor, k: int, num_groups: int | None, group_topk: int | None, choose: Callable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """scores of all experts [tokens, E] → those of the k experts that each token goes to, and their numbers.

        `choose` is Megatron's own top-k. Where it takes the same experts, its order stays: nothing changes by a bit.
        """
        values, own = choose(scores, k, num_groups, group_topk)
        if self.given is None:
            return values, own
        routes = self.given
        if torch.is_grad_enabled():
            routes = self.waiting.popleft() if self.waiting else routes
        elif self.training:
            self.waiting.append(routes)
        replayed = routes[:, :1] > 0  # [tokens, 1]
        theirs = routes.long() - 1
        differs = replayed & (own.sort(-1).values != theirs.sort(-1).values).any(-1, keepdim=True)
        if torch.is_grad_enabled():  # once a token, recomputed or not
            self.counts = self.counts + torch.stack([replayed.sum(), differs.sum()])
        experts = torch.where(differs, theirs, own)
        return scores.gather(-1, experts), experts


def routers(chunk) -> list[torch.nn.Module]:
    """The routers of a model chunk, layer by layer; [] without experts."""
    return [layer.mlp.router for layer in unwrap_model(chunk).decoder.layers if hasattr(layer.mlp, "router")]


def give(chunk, mb) -> None:
    """Hand this rank's part of `mb.routes`, [1, T, layers, k] or None, to the routers of the chunk that `mb` enters."""
    routes = None
    if mb.routes is not None:
        routes = own_stripe(mb.routes[0].movedim(0, -1))  # [layers, k, T / cp]
        if chunk.config.sequence_parallel:
            routes = routes.chunk(mpu.get_tensor_model_parallel_world_size(), dim=-1)
            routes = routes[mpu.get_tensor_model_parallel_rank()]
        routes = routes.movedim(-1, 1)  # [layers, tokens, k]
    for router in routers(chunk):
        replay = router.router_replay = router.router_replay or Replay()
        replay.given = None if routes is None else routes[router.layer_number - 1]
        replay.training = chunk.training


# ---------------------------------------------------------------- what it changed


def replayed_routes(model: list) -> dict[str, int]:
    """Of the update just computed, over all ranks and layers: "routes" that were replayed, and "routes_differ", those
    that the trainer's router would not have taken. {} where nothing was."""
    replays = [router.router_replay for chunk in model for router in routers(chunk)]
    if not replays or replays[0].given is None:
        return {}
    if any(replay.waiting for replay in replays):
        raise RuntimeError("routes were kept for a recomputation that did not come")
    counts = sum(replay.counts for replay in replays)
    dist.all_reduce(counts)  # each rank routes tokens of its own, in layers of its own
    for replay in replays:
        replay.counts = 0
    return dict(zip(("routes", "routes_differ"), counts.tolist(), strict=True))


ROUTE_METRICS = ("routes/differ_frac", "routes/missing_frac")


def route_metrics(samples: list[Sample], first: dict) -> dict[str, float]:
    """The ROUTE_METRICS of a step. `first`: the report of its first update, which uses the weights of vLLM."""
    positions = sum(s.positions for s in samples)
    differ = first["routes_differ"] / max(first["routes"], 1)
    missing = 1 - sum(len(s.routes) for s in samples) / positions
    return dict(zip(ROUTE_METRICS, (differ, missing), strict=True))
