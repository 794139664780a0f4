"""The policy with its optimizer, and the steps that it makes from recorded answers."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from config import Config
from grpo.parts.base.hf_folder import local_folder
from oracle import formulas
from oracle.models import Model, Weights, initial_factors, merge_factors, read_weights, rounded


@dataclass
class Scored:
    """An answer that a step trains on, with all that its loss needs; tensors are [tokens that the model sampled]."""

    row: dict  # of rollouts/
    sampled: list[int]  # places in the response of the tokens that the model sampled
    is_trained: bool
    rollout: Tensor  # log-probs by vLLM
    before: Tensor | None = None  # by the policy before the step's first update
    entropy: Tensor | None = None  # then
    old: Tensor | None = None  # log-probs of the ratio
    ref: Tensor | None = None
    teacher: Tensor | None = None
    advantages: Tensor | None = None


# (answer, weight of its tokens, their log-probs and entropies) → its loss, sums of "policy", "clipped", "outside"
Loss = Callable[[Scored, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


class Trainer:
    """The policy with its optimizer, and the other sets of weights of a run. `device`: where its passes run."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.dtype = cfg.model.dtype
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.folder = local_folder(cfg.model.path)
        self.model = Model(self.folder)
        self.tied = self.model.config.tie_word_embeddings
        self.frozen: Weights = {}
        self.main = self.read(self.folder, "fp32")  # what is trained
        if cfg.lora.rank:
            self.frozen = self.read(self.folder, self.dtype)
            factors = initial_factors({name: w.cpu() for name, w in self.frozen.items()}, cfg.lora.model_dump())
            self.main = {name: factor.to(self.device) for name, factor in factors.items()}
        self.first = {name: factor.clone() for name, factor in self.main.items()} if self.frozen else {}  # adapters
        self.restart(self.main)
        self.reference = dict(self.start()) if cfg.algo.kl_coef else {}
        self.teacher, self.teacher_weights = None, None
        if cfg.algo.teacher not in (None, "self"):
            folder = local_folder(cfg.algo.teacher)
            self.teacher = Model(folder)
            self.teacher_weights = read_weights(
                folder, self.dtype, self.teacher.config.tie_word_embeddings, self.device
            )

    def read(self, folder, dtype: str) -> Weights:
        """The weights of a folder in this policy's format."""
        return read_weights(folder, dtype, self.tied, self.device)

    def start(self) -> Weights:
        """The weights before the first step."""
        return self.frozen or self.read(self.folder, self.dtype)

    def restart(self, weights: Weights) -> None:
        """Go on with other weights, and a new optimizer."""
        self.main = weights
        t = self.cfg.train
        betas, eps = (t.adam_beta1, t.adam_beta2), self.cfg.megatron.get("adam_eps", 1e-8)
        self.optimizer = torch.optim.AdamW(self.main.values(), betas=betas, eps=eps, weight_decay=t.weight_decay)

    def current(self, leaves: Weights | None = None) -> Weights:
        """The weights that the model computes with; with `leaves` as a function of these, in place of our own."""
        values = leaves or {name: rounded(weight, self.dtype) for name, weight in self.main.items()}
        if not self.frozen:
            return values
        return merge_factors(self.frozen, values, self.cfg.lora.model_dump(), self.dtype)

    def passes(
        self, answers: list[Scored], temperature: float, weights: Callable[[], Weights] | None = None,
        model: Model | None = None, asked: bool = False,
    ) -> Iterator[list[tuple[int, Tensor, Tensor]]]:  # fmt: skip
        """(number of an answer, its log-probs, its entropies), a batch at a time, by the policy or by other weights.

        `asked`: after the prompt with its hint.
        """
        model = model or self.model
        prompts = [(a.row.get("asked") if asked else None) or a.row["prompt_ids"] for a in answers]
        responses = [a.row["response_ids"] for a in answers]
        for batch in model.batches(prompts, responses):
            chosen = [prompts[n] for n in batch], [responses[n] for n in batch]
            found = model.answers_logp(weights() if weights else self.current(), *chosen, temperature)
            yield [
                (n, *(value[answers[n].sampled].cpu() for value in both)) for n, both in zip(batch, found, strict=True)
            ]

    @torch.no_grad()
    def score(self, answers: list[Scored], *how, **more) -> tuple[list[Tensor], list[Tensor]]:
        """The log-probs and the entropies of the answers; `how` and `more` as in `passes`."""
        found = sorted(itertools.chain(*self.passes(answers, *how, **more)), key=lambda part: part[0])
        return [logp for _, logp, _ in found], [entropy for _, _, entropy in found]

    def prepare(self, answers: list[Scored], values: dict[str, float]) -> None:
        """Set the log-probs that the step needs besides those of its first update."""
        algo, t, temperature = self.cfg.algo, self.cfg.train, values["temperature"]
        several = t.updates_per_step * t.epochs_per_step > 1
        found = {}
        if several or algo.teacher or (algo.kl_coef and algo.kl_in == "reward"):
            found["before"], found["entropy"] = self.score(answers, temperature)
        if algo.kl_coef:
            found["ref"], _ = self.score(answers, temperature, lambda: self.reference)
        if algo.teacher:
            of_other = self.teacher and (lambda: self.teacher_weights)
            found["teacher"], _ = self.score(answers, temperature, of_other, self.teacher, asked=True)
        for n, a in enumerate(answers):
            vars(a).update({name: held[n] for name, held in found.items()})
            # With equal bits vLLM's are the policy's own, which ours are within rounding.
            is_rollout = algo.old_logp == "rollout" and not self.cfg.model.match_engine
            a.old = a.rollout if is_rollout else a.before

    def gradient(self, answers: list[Scored], weights: list[Tensor], loss: Loss, values: dict[str, float]) -> Counter:
        """The gradient of an update, into `main`; sums over its tokens of what it reports."""
        leaves = {name: rounded(weight, self.dtype).clone().requires_grad_() for name, weight in self.main.items()}
        trained = int(sum((weight > 0).sum() for weight in weights))
        sums = Counter(trained=trained, tokens=sum(len(a.sampled) for a in answers))
        for batch in self.passes(answers, values["temperature"], lambda: self.current(leaves)):
            total = torch.zeros(())
            for n, logp, entropy in batch:
                a = answers[n]
                if a.before is None:
                    a.before, a.entropy = logp.detach(), entropy.detach()
                    a.old = a.before if a.old is None else a.old
                part, report = loss(a, weights[n], logp, entropy)
                total = total + part
                for name, value in report.items():
                    sums[name] += value.item()
                sums["loss"] += part.item()
            if total.requires_grad:
                (total / max(trained, 1)).backward()
        for name, weight in self.main.items():
            weight.grad = torch.zeros_like(weight) if leaves[name].grad is None else leaves[name].grad
        grads = [weight.grad for weight in self.main.values()]
        sums["grad_norm"] = torch.nn.utils.get_total_norm(grads).item()
        return sums

    def step(self, norm: float, lr: float) -> None:
        """AdamW's step with the gradient in `main`, of this norm."""
        clip = self.cfg.train.clip_grad or math.inf
        if norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.main.values(), clip, torch.tensor(norm))
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()


def known_weights(answers: list[Scored], cfg: Config) -> list[Tensor] | None:
    """The weight of each answer's tokens in an update on these; None: a rule of a fork."""
    counts = [len(a.sampled) if a.is_trained else 0 for a in answers]
    found = formulas.answer_weights(counts, cfg.algo.loss_norm, cfg.norm_length)
    if found is None:
        return None
    return [torch.full((len(a.sampled),), weight) for a, weight in zip(answers, found.tolist(), strict=True)]


def known_loss(cfg: Config, values: dict[str, float]) -> Loss:
    """The loss by our formulas, with the coefficients of a step."""
    algo = SimpleNamespace(**cfg.algo.model_dump() | values)

    def loss(a: Scored, weight: Tensor, logp: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ref = logp.detach() if a.ref is None else a.ref
        values = formulas.answer_loss(logp, a.old, ref, a.rollout, a.advantages, weight, entropy, algo)
        total, *others = values.double().sum(1)
        return total, dict(zip(("policy", "clipped", "outside"), others, strict=True))

    return loss


def scored(row: dict, cfg: Config) -> Scored:
    """An answer of rollouts/, as a step trains on it; turns of model and environment alternate."""
    places = np.flatnonzero(np.repeat(np.arange(len(row["turns"])) % 2 == 0, row["turns"])).tolist()
    is_trained = row["finished"] or not cfg.algo.mask_truncated
    return Scored(row, places, is_trained, torch.tensor(row["rollout_logp"])[places])


def losses_of(sums: Counter) -> dict[str, float]:
    """The metrics of an update that its loss decides."""
    trained = max(sums["trained"], 1)
    means = {"loss/policy": sums["policy"] / trained, "loss/total": sums["loss"] / trained}
    return means | {"grad_norm": sums["grad_norm"]}
