"""The policy with its optimizer, and the steps that it makes from recorded answers."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from config import EvalConfig, RolloutConfig
from grpo.parts.base.hf_folder import local_folder
from oracle import formulas, nuclei
from oracle.models import Model, initial_factors, merge_factors, read_weights, rounded, token_logp
from oracle.sampling import look


@dataclass
class Answer:
    """An answer that a step trains on, with all that its loss needs; tensors are [tokens that the model sampled].

    Those from `before` on are computed later; `ref` and `teacher` are None in a run without them.
    """

    row: dict  # of rollouts/
    sampled: list[int]  # places in the response of the tokens that the model sampled
    is_trained: bool
    sampling: RolloutConfig | EvalConfig  # by which it was sampled
    rollout: Tensor  # log-probs by vLLM
    nuclei: list | None  # of each token of the response; with a cut of the sampler
    part_weights: dict  # of each part in its reward
    routes: list = field(default_factory=list)  # of the policy before the first update, layer by layer; models.routed
    before: Tensor = None  # by the policy before the step's first update
    old: Tensor = None  # log-probs of the ratio
    ref: Tensor = None
    teacher: Tensor = None
    advantages: Tensor = None  # its own, at each token
    token_advantages: Tensor = None  # what the loss is given
    weights: Tensor = None  # of its tokens in the update
    shadow: "Answer | None" = None  # the same by the trainer's shadow
    shift: float = 0.0  # of a shadow: tokens as near to a bound of the loss, in nats, are on its other side
    seen: Tensor = None  # before the first update, [values, tokens]: what oracle/sampling.py looks for

    @property
    def tokens(self):
        """Ids of the tokens that the model sampled."""
        return [self.row["response_ids"][place] for place in self.sampled]


def answer_of(row, cfg, sampling=None):
    """An answer of rollouts/, as a step trains on it; turns of model and environment alternate. `sampling` is the
    section eval of an evaluation's answer.
    """
    is_models = np.arange(len(row["turns"])) % 2 == 0
    places = np.flatnonzero(np.repeat(is_models, row["turns"])).tolist()
    is_trained = row["finished"] or not cfg.algo.mask_truncated
    logps = torch.tensor([math.nan if logp is None else logp for logp in row["rollout_logp"]])
    weights = {part: weight_of(part, row["source"], cfg) for part in row["reward_parts"]}
    given = is_trained, sampling or cfg.rollout, logps[places]
    return Answer(row, places, *given, nuclei.nuclei_of(row, places), weights)


def weight_of(part, source, cfg):
    """The weight of a part in the reward of a source; the part of a reward in a sum is named "reward/part"."""
    spec = cfg.reward.by_source.get(source, cfg.reward.default)
    if part == "overlong":
        return cfg.algo.overlong_coef
    return spec.get(part.partition("/")[0], 1.0) if isinstance(spec, dict) else 1.0


class Trainer:
    """The policy with its optimizer, and the other sets of weights of a run.

    `main` is trained: the weights, or with LoRA the factors of the `frozen` weights. In bf16 and fp16 a `shadow` makes
    the same updates with rounded layers: how far it is from this trainer, a healthy run may be too.
    """

    def __init__(self, cfg, is_shadow=False):
        self.cfg = cfg
        self.sums = Counter()  # of the last gradient
        self.shadow = None if is_shadow or cfg.model.dtype == "fp32" else Trainer(cfg, is_shadow=True)
        self.dtype = cfg.model.dtype
        self.ends = set()  # end tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.folder = local_folder(cfg.model.path)
        rounds_to = self.dtype if is_shadow else "fp32"
        self.model = Model(self.folder, rounds_to)
        self.tied = self.model.config.tie_word_embeddings

        # The policy.
        self.frozen = {}
        self.first = {}  # factors before the first step
        self.main = self.read(self.folder, "fp32")
        if cfg.lora.rank:
            self.frozen = self.read(self.folder, self.dtype)
            self.first = {n: w.to(self.device) for n, w in initial_factors(self.frozen, cfg.lora).items()}
            self.main = {name: factor.clone() for name, factor in self.first.items()}
        self.previous = self.main  # before the last update
        betas = (cfg.train.adam_beta1, cfg.train.adam_beta2)
        eps = cfg.megatron.get("adam_eps", 1e-8)
        self.optimizer = torch.optim.AdamW(
            self.main.values(), betas=betas, eps=eps, weight_decay=cfg.train.weight_decay
        )

        # The reference, and a teacher that is another model.
        self.reference = dict(self.start()) if cfg.algo.kl_coef else {}
        self.teacher = None
        self.teacher_weights = None
        if cfg.algo.teacher not in (None, "self"):
            folder = local_folder(cfg.algo.teacher)
            self.teacher = Model(folder, rounds_to)
            tied = self.teacher.config.tie_word_embeddings
            self.teacher_weights = read_weights(folder, self.dtype, tied, self.device)

    # ---------------------------------------------------------------- weights

    def read(self, folder, dtype):
        """The weights of a folder in this policy's format."""
        return read_weights(folder, dtype, self.tied, self.device)

    def start(self):
        """The weights before the first step."""
        return self.frozen or self.read(self.folder, self.dtype)

    @torch.no_grad()
    def take(self, weights):
        """Go on with other values of some tensors; the optimizer keeps its moments."""
        for name, weight in weights.items():
            self.main[name].copy_(weight)
        if self.shadow:
            self.shadow.take(weights)

    def current(self, leaves=None):
        """The weights that the model computes with, as a function of `leaves` or, without these, of `main`."""
        values = leaves or {name: rounded(weight, self.dtype) for name, weight in self.main.items()}
        if not self.frozen:
            return values
        return merge_factors(self.frozen, values, self.cfg.lora, self.dtype)

    def before(self):
        """The weights that the model computed with before the last update."""
        return self.current({name: rounded(weight, self.dtype) for name, weight in self.previous.items()})

    # ---------------------------------------------------------------- a step

    def prepare(self, answers, several):
        """Set the log-probs that the step needs and that its first update does not give. `several`: of its updates."""
        algo = self.cfg.algo
        for a in answers:
            a.shadow = replace(a, routes=[])  # in half precision vLLM's routers choose otherwise for some tokens
        is_sampled = algo.teacher and algo.teacher_kl == "sampled"
        if several or is_sampled or (algo.kl_coef and algo.kl_in == "reward"):
            self.score(answers, "before")
        if self.reference:
            self.score(answers, "ref", self.reference)
        if is_sampled:
            self.score(answers, "teacher", self.teacher_weights, self.teacher, hinted=True)

        # With equal bits vLLM's log-probs are the policy's own. Ours then stand for both, within rounding.
        is_rollout = algo.old_logp == "rollout" and not self.cfg.model.match_engine
        for a in answers:
            a.old = a.rollout if is_rollout else a.before
        if self.shadow:
            self.shadow.prepare([a.shadow for a in answers], several)

    def gradient(self, answers, trained, loss):
        """The gradient of an update, into `main`; sums over its tokens of what it reports.

        The sum of all losses is divided by `trained`. loss(answer, logp, entropy, divergences) returns the answer's
        loss and {"policy", "clipped": sum over the tokens}.
        """
        leaves = {name: rounded(weight, self.dtype).clone().requires_grad_() for name, weight in self.main.items()}
        sums = Counter(trained=trained, tokens=sum(len(a.sampled) for a in answers), updates=1)

        for batch in self.passes(answers, lambda: self.current(leaves), replays=True):
            total = torch.zeros(())
            others = self.other_models(batch)
            for a, logps in batch:
                logp = token_logp(logps, a.tokens).cpu()
                entropy = -(logps.exp() * logps).sum(-1).cpu()
                if a.before is None:
                    a.before = logp.detach()
                    a.seen = look(logps, a.tokens, self.ends)
                if a.old is None:
                    a.old = a.before

                measured = {"entropy": entropy}
                if a.ref is not None:
                    measured["k3"] = formulas.kl(logp.detach(), a.ref, "k3")
                divergences = {}
                for name, (*_, how) in self.compared().items():
                    other = others[name, id(a)]
                    divergences[name] = formulas.divergence(logps, other, *how).cpu()
                    if name == "teacher_kl":
                        measured["teacher_entropy"] = torch.special.entr(other.exp())
                part, report = loss(a, logp, entropy, divergences)
                total = total + part
                for name, values in (measured | divergences | report | {"loss": part}).items():
                    sums[name] += values.sum().item()
            if total.requires_grad:
                (total / max(trained, 1)).backward()

        for name, weight in self.main.items():
            weight.grad = torch.zeros_like(weight) if leaves[name].grad is None else leaves[name].grad
        sums["grad_norm"] = torch.nn.utils.get_total_norm([weight.grad for weight in self.main.values()]).item()
        self.sums = sums

        if self.shadow:
            for a in answers:
                a.shadow.token_advantages, a.shadow.weights = a.token_advantages, a.weights
            self.shadow.gradient([a.shadow for a in answers], trained, loss)
        return sums

    def step(self, norm, lr):
        """AdamW's step with the gradient in `main`, of this norm."""
        clip = self.cfg.train.clip_grad or math.inf
        if norm > 0:
            self.previous = {name: weight.detach().clone() for name, weight in self.main.items()}
            torch.nn.utils.clip_grads_with_norm_(self.main.values(), clip, torch.tensor(norm))
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
        if self.shadow:
            self.shadow.step(self.shadow.sums["grad_norm"], lr)

    # ---------------------------------------------------------------- forward passes

    @torch.no_grad()
    def score(self, answers, name, weights=None, model=None, hinted=False):
        """Set the attribute `name` of the answers to their log-probs by the policy, or by other weights."""
        given = weights or self.current()
        replays = weights is None and not hinted  # after a hint routers choose for themselves
        for batch in self.passes(answers, lambda: given, model, hinted, replays):
            for a, logps in batch:
                setattr(a, name, token_logp(logps, a.tokens).cpu())
                if name == "before":
                    a.seen = look(logps, a.tokens, self.ends)

    def compared(self):
        """The divergences over the whole vocabulary that the loss has, {name: (model, weights, has hints, kind)}. A
        model without weights of its own has the policy's.
        """
        algo = self.cfg.algo
        found = {}
        if algo.kl == "full" and self.reference:
            found["ref_kl"] = self.model, self.reference, False, ()
        if algo.teacher and algo.teacher_kl != "sampled":
            how = algo.teacher_kl, algo.teacher_beta, algo.teacher_top_k
            found["teacher_kl"] = self.teacher or self.model, self.teacher_weights, True, how
        return found

    @torch.no_grad()
    def other_models(self, batch):
        """{(name, id of an answer): log-probs of all tokens} by the models of `compared`, for a batch of `passes`."""
        found = {}
        for name, (model, weights, hinted, _) in self.compared().items():
            given = weights or self.current()
            rows = batch[0][1].shape[1]
            others = self.passes([a for a, _ in batch], lambda given=given: given, model, hinted, rows=rows)
            found |= {(name, id(a)): logps for other in others for a, logps in other}
        return found

    def passes(self, answers, weights, model=None, hinted=False, replays=False, is_cut=True, rows=None):
        """Batches of (answer, log-probs of all tokens where its own were sampled [tokens, vocabulary]), by `weights()`.

        With `hinted` an answer is scored after the prompt with its hint, where it has one. With `replays` its tokens
        go to the experts that algo.replay_routes keeps. Log-probs are over its nuclei unless not `is_cut`, and over the
        first `rows` of the vocabulary, if given.
        """
        model = model or self.model
        prompts = [(hinted and a.row.get("asked")) or a.row["prompt_ids"] for a in answers]
        responses = [a.row["response_ids"] for a in answers]
        for batch in model.batches(prompts, responses):
            chosen = [answers[n] for n in batch]
            given = [prompts[n] for n in batch], [responses[n] for n in batch]
            kept = [ids for a in chosen for ids in a.nuclei or ()] if is_cut else ()
            routes = [a.routes for a in chosen] if replays and self.cfg.algo.replay_routes else None
            found = model.vocabulary_logp(weights(), *given, chosen[0].sampling.temperature, kept, routes, rows)
            yield [(a, logps[a.sampled]) for a, logps in zip(chosen, found, strict=True)]


# ---------------------------------------------------------------- weights of tokens, and the loss


def known_weights(answers, cfg):
    """The weights of each answer's sampled tokens in an update on these."""
    counts = [len(a.sampled) if a.is_trained else 0 for a in answers]
    found = formulas.answer_weights(counts, cfg.algo.loss_norm, cfg.norm_length)
    return [torch.full((len(a.sampled),), weight) for a, weight in zip(answers, found.tolist(), strict=True)]


def known_loss(algo):
    """The loss by our formulas."""

    def loss(a, logp, entropy, divergences):
        ref = logp.detach() if a.ref is None else a.ref

        def values_at(old):
            given = logp, old, ref, a.rollout, a.token_advantages, a.weights, entropy, algo
            return formulas.answer_loss(*given, **divergences)

        values = whole = values_at(a.old)
        for shift in (a.shift, -a.shift) if a.shift else ():
            others = values_at(a.old + shift)
            values = torch.where((others[2:] != whole[2:]).any(0), others, values)
        total, policy, clipped, _ = values.double().sum(1)
        return total, {"policy": policy, "clipped": clipped}

    return loss
