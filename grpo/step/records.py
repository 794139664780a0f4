"""The data of a step: samples, a batch (all samples end to end), and micro-batches (packed rows of the batch)."""

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo.parts.base import ranks
from grpo.parts.base.ranks import to_device


@dataclass
class Sample:
    """One answer to a prompt; the phases of a step fill it in. `group` is the number of its prompt in the step."""

    group: int
    prompt_ids: np.ndarray  # int32; a list becomes an array, here and below
    response_ids: np.ndarray  # int32, as vLLM sampled them, the end token included
    rollout_logp: np.ndarray  # float32, vLLM's log-prob of each of them; 0 where an environment wrote the token
    finished: bool  # ended by itself, not truncated at the token budget
    text: str | None  # for rewards and rollouts/ only, never tokenised again; None on ranks other than 0
    source: str
    turns: list[int] = field(default_factory=list)  # lengths of the response's parts: model, environment, model, ...
    asked: np.ndarray | None = None  # int32, ids of the prompt with its hint, for the teacher; None: prompt_ids
    routes: np.ndarray | None = None  # [tokens, layers, k], experts that vLLM chose; None without algo.replay_routes
    nuclei: np.ndarray | None = None  # int32, ids that the model's tokens were drawn from, -1 after each; None: all
    graded: str = "ok"  # ok | timeout | error; the last two have reward 0
    error: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    tokens: dict[str, np.ndarray] = field(default_factory=dict)  # further numbers of each response token, for rollouts/
    seed: int | None = None  # of its group; of a conversation that of the first turn
    sampling: list[dict] = field(default_factory=list)  # for each turn of the model, what vLLM was asked; for rollouts/

    @property
    def positions(self) -> int:
        """Number of positions, each of which predicts a token: one for every token but the last."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    @property
    def sampled(self) -> np.ndarray:
        """True where the model sampled the token of the response, not an environment; [tokens] bool."""
        return np.repeat(np.arange(len(self.turns)) % 2 == 0, self.turns)  # turns of model and environment alternate

    @classmethod
    def of(cls, group: int, prompt, completion, text: str, seed: int) -> "Sample":
        """The completion of a prompt (rollout.Completion, grpo.parts.data.prompts.Prompt), decoded as `text`."""
        return cls(
            group=group, prompt_ids=prompt.ids, response_ids=completion.ids, rollout_logp=completion.logps,
            finished=completion.finished, text=text, source=prompt.source, seed=seed, turns=completion.turns,
            sampling=completion.sampling, asked=prompt.asked, routes=completion.routes,
            nuclei=completion.nuclei and np.array(completion.nuclei, "i4"),
        )  # fmt: skip

    def __post_init__(self):
        self.prompt_ids = np.asarray(self.prompt_ids, "i4")
        self.response_ids = np.asarray(self.response_ids, "i4")
        self.rollout_logp = np.asarray(self.rollout_logp, "f4")
        self.turns = self.turns or [len(self.response_ids)]


@dataclass(frozen=True)
class Rows:
    """Values of each position, which holds a token and its target, the next: [F] in a Batch, [1, T] in a MicroBatch.

    No tensor is changed in place. Numbers are int32 or float32; routes take 1 or 2 bytes each.
    """

    tokens: torch.Tensor  # ids
    targets: torch.Tensor  # id of the next token
    mask: torch.Tensor  # bool, where the target is a token that the model sampled
    rollout_logp: torch.Tensor  # vLLM's, of the target; 0 where the mask is False
    advantages: torch.Tensor | None = None
    weights: torch.Tensor | None = None  # of each token in the loss; 0 where it is not trained
    old_logp: torch.Tensor | None = None  # None: grpo_loss uses its own, detached
    ref_logp: torch.Tensor | None = None  # None: no reference model
    routes: torch.Tensor | None = (
        None  # [..., layers, k] of the token, grpo/parts/model/routes.py; None: the router's own
    )


@dataclass(frozen=True)
class Collected:
    """What a step has sampled and graded; the same on every rank."""

    samples: list[Sample]  # all, also those of groups that were replaced
    kept: list[Sample]  # of the groups to train on
    rounds: int  # of sampling
    rank_seconds: list[dict[str, float]]  # of each rank: its seconds by phase when all samples were gathered


@dataclass(frozen=True, kw_only=True)
class Batch(Rows):
    """All samples of a step end to end, F positions."""

    lengths_N: np.ndarray  # positions of each sample
    loss_mask: torch.Tensor  # the mask, but False in answers that are left out of the loss
    teacher_logp: torch.Tensor | None = None  # None: no teacher
    nuclei: list[np.ndarray] | None = None  # those of each sample; None: log-probs are of the whole vocabulary

    @cached_property
    def starts_N(self) -> np.ndarray:
        """Place of each sample's first position."""
        return np.cumsum(self.lengths_N) - self.lengths_N

    @property
    def seq_id(self) -> torch.Tensor:
        """Number of each position's sample, [F]; computed at each use, as `position_ids` is."""
        return torch.from_numpy(np.repeat(np.arange(len(self.lengths_N), dtype=np.int32), self.lengths_N))

    @property
    def position_ids(self) -> torch.Tensor:
        """Place of each token in its own sample, [F]."""
        starts_F = np.repeat(self.starts_N.astype(np.int32), self.lengths_N)
        return torch.from_numpy(np.arange(len(starts_F), dtype=np.int32) - starts_F)

    @cached_property
    def prompts_N(self) -> np.ndarray:
        """Positions of each sample's prompt: those up to the first whose target the model sampled, or all."""
        sampled = np.append(np.flatnonzero(self.mask.numpy()), len(self.tokens))
        first_N = sampled[np.searchsorted(sampled, self.starts_N)]
        return np.minimum(first_N + 1 - self.starts_N, self.lengths_N)

    @cached_property
    def same_prompt_N(self) -> np.ndarray:
        """A number for each sample, the same where the tokens of the prompts, and their routes, are the same."""
        held = [values.numpy() for values in (self.tokens, self.routes) if values is not None]
        numbers = {}
        pieces = [slice(start, start + size) for start, size in zip(self.starts_N, self.prompts_N, strict=True)]
        prompts = [b"".join(values[piece].tobytes() for values in held) for piece in pieces]
        return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=np.int64)

    def take(self, samples: list[int]) -> "Batch":
        """The batch of these samples alone, numbered from 0."""
        pieces = [slice(start, start + length) for start, length in zip(self.starts_N, self.lengths_N, strict=True)]
        values = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        taken = {name: torch.cat([value[pieces[n]] for n in samples]) for name, value in values.items()}
        nuclei = self.nuclei and [self.nuclei[n] for n in samples]
        return replace(self, **taken, lengths_N=self.lengths_N[samples], nuclei=nuclei)

    def sums(self, values_F: torch.Tensor) -> np.ndarray:
        """The sum over each sample's positions, [F] → [N] float64."""
        return np.add.reduceat(values_F.numpy(), self.starts_N, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Rows):
    """S sequences in one row of T positions, one after another.

    Padding is at the end of the row and masked, in sequences of its own. Where neighbours share a prompt, its positions
    are computed for the first of them only: C of the T positions, `kept`. The others are copies, as `place` says.
    """

    samples: np.ndarray  # numbers of the row's samples in the Batch, [at most S]
    starts: np.ndarray  # place of each one's first position in the Batch
    lengths: np.ndarray  # positions of each, without padding
    rows: np.ndarray  # [M], the positions where the mask is True
    cu_seqlens: torch.Tensor  # [S + 1] int32, where sequences begin and end
    sizes: np.ndarray  # positions of each sequence, [S]
    kept: np.ndarray | None = None  # [C] int64, the positions that are computed; None: all
    place: np.ndarray | None = None  # [T] int64, which of these each position is
    nuclei: list[np.ndarray] | None = None  # those of the Batch

    @property
    def width(self) -> int:
        """Number of positions that are computed, C."""
        return self.tokens.shape[1] if self.kept is None else len(self.kept)

    @property
    def queries(self) -> np.ndarray:
        """Positions of each sequence that are computed, [S]: its last."""
        if self.kept is None:
            return self.sizes
        return np.diff(np.searchsorted(self.kept, np.cumsum([0, *self.sizes])))

    def computed(self, values_T: torch.Tensor) -> torch.Tensor:
        """The values of the computed positions; [..., T] → [..., C]."""
        if self.kept is None:
            return values_T
        return values_T.index_select(-1, to_device(torch.from_numpy(self.kept), values_T.device))

    def at_any_copy(self, where_T: torch.Tensor) -> torch.Tensor:
        """Whether `where_T` holds at a computed position or at one of its copies; [1, T] → [1, C] bool."""
        if self.place is None:
            return where_T
        place_T = to_device(torch.from_numpy(self.place), where_T.device)
        return torch.zeros(1, self.width, device=where_T.device).index_add(1, place_T, where_T.float()) > 0

    @property
    def index_T(self) -> torch.Tensor:
        """Place in the Batch of each position that is not padding; computed at each use, like all properties below."""
        shift = np.repeat(self.starts - np.cumsum(self.lengths) + self.lengths, self.lengths)
        return torch.from_numpy(np.arange(len(shift)) + shift)

    @property
    def seq_id(self) -> torch.Tensor:
        """Number of each position's sample in the Batch, -1: padding; [1, T]."""
        numbers_T = np.repeat(self.samples, self.lengths)
        return torch.from_numpy(np.pad(numbers_T, (0, self.tokens.shape[1] - len(numbers_T)), constant_values=-1))[None]

    @property
    def position_ids(self) -> torch.Tensor:
        """Place of each token in its own sequence, [1, T]."""
        starts_T = self.cu_seqlens[self.sequence_T]
        return (torch.arange(len(starts_T), dtype=torch.int32, device=starts_T.device) - starts_T)[None]

    @property
    def sequence_T(self) -> torch.Tensor:
        """Number of each position's sequence in this row, [T]."""
        lengths_S = self.cu_seqlens.diff()
        numbers_S = torch.arange(len(lengths_S), device=lengths_S.device)
        return numbers_S.repeat_interleave(lengths_S, output_size=self.tokens.shape[1])


def gather_samples(samples: list[Sample], own: Any) -> tuple[list[Sample], list]:
    """Gather all ranks' samples, sorted by group, texts on rank 0 only, and what each rank gives as `own`."""
    texts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object([sample.text for sample in samples], texts)
    for sample in samples:
        sample.text = None
    everywhere = ranks.gather((samples, own))
    samples = [sample for part, _ in everywhere for sample in part]
    for sample, text in zip(samples, itertools.chain(*texts or []), strict=False):
        sample.text = text
    return sorted(samples, key=lambda sample: sample.group), [own for _, own in everywhere]
