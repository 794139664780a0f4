"""The data of a step: samples, a batch (all samples end to end), and micro-batches (packed rows of the batch)."""

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from grpo.parts.base import ranks
from grpo.parts.base.ranks import to_device
from grpo.parts.model.attention import count_from
from grpo.parts.model.divergence import OtherModel
from grpo.parts.model.nucleus import Nuclei
from grpo.parts.model.routes import Routes
from rollout import Trace


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
    trace: Trace = field(default_factory=Trace)  # how vLLM, and perhaps an environment, made the response
    asked: np.ndarray | None = None  # int32, ids of the prompt with its hint, for the teacher; None means prompt_ids
    graded: str = "ok"  # or timeout or error, which have reward 0
    error: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    seed: int | None = None  # of its group

    @property
    def turns(self) -> list[int]:
        """Lengths of the response's parts: of the model, the environment, the model, ..."""
        return self.trace.turns or [len(self.response_ids)]

    @property
    def positions(self):
        """Number of positions, each of which predicts a token: one for every token but the last."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    @property
    def sampled(self):
        """True where the model sampled the token of the response, not an environment; [tokens] bool."""
        return np.repeat(np.arange(len(self.turns)) % 2 == 0, self.turns)  # turns of model and environment alternate

    def as_row(self):
        """The row of rollouts/: the fields that are not None, the turns, vLLM's settings for each answer and, where it
        cut, the ids that each sampled token was drawn from, with -1 after them.
        """
        row = {name: value for name, value in vars(self).items() if value is not None}
        row |= {name: ids for name, ids in self.trace.replay.items() if name == "nuclei"}
        del row["trace"]
        row |= {"turns": self.turns, "sampling": self.trace.requests}
        return row | {"ended": self.trace.ended} if self.trace.ended else row

    @classmethod
    def of(cls, group, prompt, completion, text, seed):
        """The completion of a prompt (rollout.Completion, grpo.parts.data.prompts.Prompt), decoded as `text`."""
        return cls(
            group=group, prompt_ids=prompt.ids, response_ids=completion.ids, rollout_logp=completion.logps,
            finished=completion.finished, text=text, source=prompt.source, seed=seed, asked=prompt.asked,
            trace=completion.trace,
        )  # fmt: skip

    def __post_init__(self):
        self.prompt_ids = np.asarray(self.prompt_ids, "i4")
        self.response_ids = np.asarray(self.response_ids, "i4")
        self.rollout_logp = np.asarray(self.rollout_logp, "f4")


# What the trainer replays of the sampler → how a batch and a micro-batch hold it. A kind has `concatenate`, of samples
# to a batch; `take` and `row`, as Batch.take and packing.pack do with tensors; `join`, for the turns of a conversation;
# `of_positions` and `for_other_weights`.
REPLAYED = {"routes": Routes, "nuclei": Nuclei}
Replay = dict[str, Routes | Nuclei]  # {} where nothing is replayed


def to_replay(samples: list[Sample], lengths_N):
    """What a batch of the samples replays, given each sample's number of positions."""
    replay = {}
    for name in samples[0].trace.replay:
        replay[name] = REPLAYED[name].concatenate([s.trace.replay[name] for s in samples], lengths_N)
    return replay


@dataclass(frozen=True)
class Rows:
    """Values of each position, which holds a token and its target, the next: [F] in a Batch, [1, T] in a MicroBatch.

    No tensor is changed in place. Numbers are int32 or float32.
    """

    tokens: torch.Tensor  # ids
    targets: torch.Tensor  # id of the next token
    mask: torch.Tensor  # bool, where the target is a token that the model sampled
    rollout_logp: torch.Tensor  # vLLM's, of the target; 0 where the mask is False
    advantages: torch.Tensor | None = None
    weights: torch.Tensor | None = None  # of each token in the loss; 0 where it is not trained
    old_logp: torch.Tensor | None = None  # without it grpo_loss uses its own, detached
    ref_logp: torch.Tensor | None = None  # None without a reference model
    # Over the whole vocabulary, from the micro-batch's own forward pass; None without algo.kl=full or algo.teacher_kl
    ref_kl: torch.Tensor | None = None  # differentiable
    teacher_kl: torch.Tensor | None = None  # differentiable
    teacher_entropy: torch.Tensor | None = None


@dataclass(frozen=True)
class Collected:
    """What a step has sampled and graded; the same on every rank."""

    samples: list[Sample]  # all, also those of groups that were replaced
    kept: list[Sample]  # of the groups to train on
    rounds: int  # of sampling
    rank_seconds: list[dict[str, float]]  # of each rank: its seconds by phase before the samples were gathered


@dataclass(frozen=True, kw_only=True)
class Batch(Rows):
    """All samples of a step end to end, F positions."""

    lengths_N: np.ndarray  # positions of each sample
    loss_mask: torch.Tensor  # the mask, but False in answers that are left out of the loss
    teacher_logp: torch.Tensor | None = None  # None without a teacher
    replay: Replay = field(default_factory=dict)

    @cached_property
    def starts_N(self):
        """Place of each sample's first position."""
        return np.cumsum(self.lengths_N) - self.lengths_N

    @property
    def seq_id(self):
        """Number of each position's sample, [F]; computed at each use, as `position_ids` is."""
        return torch.from_numpy(np.repeat(np.arange(len(self.lengths_N), dtype=np.int32), self.lengths_N))

    @property
    def position_ids(self):
        """Place of each token in its own sample, [F]."""
        return count_from(np.zeros_like(self.lengths_N), self.lengths_N).int()

    @cached_property
    def prompts_N(self):
        """Positions of each sample's prompt: those up to the first whose target the model sampled, or all."""
        sampled = np.append(np.flatnonzero(self.mask.numpy()), len(self.tokens))
        first_N = sampled[np.searchsorted(sampled, self.starts_N)]
        return np.minimum(first_N + 1 - self.starts_N, self.lengths_N)

    @cached_property
    def same_prompt_N(self):
        """A number for each sample, the same where prompts have the same tokens, computed in the same way."""
        values = [self.tokens, *(value for kind in self.replay.values() for value in kind.of_positions())]
        arrays = [value.numpy() for value in values]

        numbers = {}  # a prompt's bytes → its number
        same_prompt_N = np.zeros(len(self.lengths_N), dtype=np.int64)
        for n, (start, size) in enumerate(zip(self.starts_N, self.prompts_N, strict=True)):
            prompt = b"".join(array[start : start + size].tobytes() for array in arrays)
            same_prompt_N[n] = numbers.setdefault(prompt, len(numbers))
        return same_prompt_N

    def take(self, samples: list[int]):
        """The batch of these samples alone, numbered from 0."""
        index_F = count_from(self.starts_N[samples], self.lengths_N[samples])
        taken = {name: value[index_F] for name, value in vars(self).items() if torch.is_tensor(value)}
        replay = {name: kind.take(samples, index_F) for name, kind in self.replay.items()}
        return replace(self, **taken, lengths_N=self.lengths_N[samples], replay=replay)

    def for_other_weights(self):
        """The batch as other weights score it: they replay no choice that the policy's own weights have made."""
        return replace(self, replay={name: kind.for_other_weights() for name, kind in self.replay.items()})

    def sums(self, values_F):
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
    kept: np.ndarray | None = None  # [C] int64, the positions that are computed; None means all
    place: np.ndarray | None = None  # [T] int64, which of these each position is
    replay: Replay = field(default_factory=dict)
    others: dict[str, OtherModel] = field(default_factory=dict)  # "reference", "teacher": for these three

    @property
    def width(self):
        """Number of positions that are computed, C."""
        return self.tokens.shape[1] if self.kept is None else len(self.kept)

    @property
    def queries(self):
        """Positions of each sequence that are computed, [S]: its last."""
        if self.kept is None:
            return self.sizes
        return np.diff(np.searchsorted(self.kept, np.cumsum([0, *self.sizes])))

    def computed(self, values_T):
        """The values of the computed positions; [..., T] → [..., C]."""
        if self.kept is None:
            return values_T
        return values_T.index_select(-1, to_device(torch.from_numpy(self.kept), values_T.device))

    def at_any_copy(self, where_T):
        """Whether `where_T` holds at a computed position or at one of its copies; [1, T] → [1, C] bool."""
        if self.place is None:
            return where_T
        place_T = to_device(torch.from_numpy(self.place), where_T.device)
        return torch.zeros(1, self.width, device=where_T.device).index_add(1, place_T, where_T.float()) > 0

    @property
    def index_T(self):
        """Place in the Batch of each position that is not padding; computed at each use, like all properties below."""
        return count_from(self.starts, self.lengths)

    @property
    def position_ids(self):
        """Place of each token in its own sequence, [1, T]."""
        starts_T = self.cu_seqlens[self.sequence_T]
        return (torch.arange(len(starts_T), dtype=torch.int32, device=starts_T.device) - starts_T)[None]

    @property
    def sequence_T(self):
        """Number of each position's sequence in this row, [T]."""
        lengths_S = self.cu_seqlens.diff()
        numbers_S = torch.arange(len(lengths_S), device=lengths_S.device)
        return numbers_S.repeat_interleave(lengths_S, output_size=self.tokens.shape[1])


def gather_samples(samples: list[Sample], own) -> tuple[list[Sample], list]:
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
