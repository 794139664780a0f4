"""The steps of a run, once more: from the answers that it sampled, with weights, moments and gradients of our own."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from support.proof import formulas
from tests.oracle import algorithm as plain
from tests.oracle.comparison import Comparison
from tests.oracle.models import Model, initial_factors, merge_factors, read_weights, rounded
from tests.oracle.recorded import Recorded

Weights = dict[str, Tensor]


@dataclass
class Scored:
    """One answer of a step, with all that its loss needs; tensors are [tokens that the model sampled]."""

    row: dict  # of rollouts/
    sampled: list[int]  # places in the response of the tokens that the model sampled
    is_trained: bool
    rollout: Tensor  # log-probs by vLLM
    before: Tensor  # by the policy before the step's first update
    old: Tensor  # those of the ratio
    sampler: Tensor  # by us, with the weights that vLLM sampled with
    ref: Tensor | None = None
    teacher: Tensor | None = None
    advantages: Tensor | None = None


@dataclass
class Sums:
    """What the updates of a step report, summed over their tokens."""

    loss: float = 0.0
    policy: float = 0.0
    trained: int = 0
    tokens: int = 0
    values: dict[str, float] = field(default_factory=dict)
    gap_max: float = 0.0
    routes: int = 0
    routes_differ: int = 0
    grad_norm: float = math.nan

    def add(self, name: str, value: Tensor) -> None:
        """Add the values of an answer's tokens to those of a name."""
        self.values[name] = self.values.get(name, 0.0) + value.double().sum().item()


class Trainer:
    """The policy with its optimizer, and the other sets of weights of a run."""

    def __init__(self, config: dict):
        self.config = config
        self.algo = SimpleNamespace(**config["algo"])  # as the formulas want it
        self.dtype = config["model"]["dtype"]
        folder = config["model"]["path"]
        self.model = Model(folder)
        initial = read_weights(folder, self.dtype, self.model.config.tie_word_embeddings)
        self.frozen: Weights = {}
        self.main = initial  # what is trained, in fp32
        if config["lora"]["rank"]:
            self.frozen = initial
            self.main = initial_factors(initial, config["lora"], self.dtype)
        self.mean = {name: torch.zeros_like(weight) for name, weight in self.main.items()}  # Adam's moments
        self.square = {name: torch.zeros_like(weight) for name, weight in self.main.items()}
        self.updates = 0
        self.reference = self.current()
        self.after = [self.current()]  # the weights after 0, 1, 2, ... steps
        self.teacher, self.teacher_weights = None, None
        teacher = config["algo"]["teacher"]
        if teacher not in (None, "self"):
            self.teacher = Model(teacher)
            self.teacher_weights = read_weights(teacher, self.dtype, self.teacher.config.tie_word_embeddings)

    def current(self, leaves: Weights | None = None) -> Weights:
        """The weights that the model computes with; with `leaves` as a function of these, in place of our own."""
        values = leaves or {name: rounded(weight, self.dtype) for name, weight in self.main.items()}
        if not self.frozen:
            return values
        return merge_factors(self.frozen, values, self.config["lora"], self.dtype)

    def sampler_weights(self, step: int) -> Weights:
        """The weights that vLLM sampled with: those of rollout.lag steps before the present ones."""
        return self.after[max(step - 1 - self.config["rollout"].get("lag", 0), 0)]

    @torch.no_grad()
    def score(self, answers: list[dict], step: int, values: dict[str, float]) -> list[Scored]:
        """The answers that the step trains on, with log-probs by each set of weights that it uses."""
        algo, temperature = self.config["algo"], values["temperature"]
        every = algo.get("reference_every", 0)
        if every and (step - 1) % every == 0:
            self.reference = self.after[-1]
        replay = algo["replay_routes"]
        scored = []
        for row in answers:
            prompt, asked = row["prompt_ids"], row.get("asked") or row["prompt_ids"]
            sampled = sampled_places(row)

            def logp(weights, ids=prompt, replay=False, model=self.model, row=row, sampled=sampled):
                return model.answer_logp(weights, ids, row, temperature, replay)[0][sampled]

            before = logp(self.after[-1], replay=replay)
            rollout = torch.tensor(row["rollout_logp"])[sampled]
            is_trained = row["finished"] or not algo["mask_truncated"]
            old = rollout if algo["old_logp"] == "rollout" else before
            answer = Scored(row, sampled, is_trained, rollout, before, old, before)
            if self.config["rollout"].get("lag", 0):
                answer.sampler = logp(self.sampler_weights(step), replay=replay)
            if self.config["algo"]["kl_coef"]:
                answer.ref = logp(self.reference)
            if algo["teacher"] == "self":
                answer.teacher = logp(self.after[-1], asked)
            elif algo["teacher"]:
                answer.teacher = logp(self.teacher_weights, asked, model=self.teacher)
            scored.append(answer)
        return scored

    def set_advantages(self, answers: list[Scored], values: dict[str, float]) -> None:
        """Set the advantages of the answers."""
        algo = self.config["algo"]
        rows = [[] for _ in answers]
        for group in {a.row["group"] for a in answers}:
            members = [i for i, a in enumerate(answers) if a.row["group"] == group]
            charges = []
            for i in members:
                charge = torch.zeros(len(answers[i].row["response_ids"]), dtype=torch.float64)
                if algo["kl_in"] == "reward" and values["kl_coef"]:
                    kl = formulas.kl(answers[i].old, answers[i].ref, algo["kl"])
                    charge[answers[i].sampled] = values["kl_coef"] * kl.double()
                charges.append(charge.tolist())
            found = plain.group_advantages([answers[i].row for i in members], charges, algo)
            for i, advantages in zip(members, found, strict=True):
                rows[i] = advantages
        if algo["advantage"] == "reinforce_pp":
            pairs = zip(answers, rows, strict=True)
            trained = [[a.is_trained and t in a.sampled for t in range(len(row))] for a, row in pairs]
            rows = plain.whiten(rows, trained)
        for a, row in zip(answers, rows, strict=True):
            a.row["own_advantages"] = row
            a.advantages = torch.tensor(row)[a.sampled]
            if a.teacher is not None:
                a.advantages = a.advantages - algo["teacher_coef"] * (a.old - a.teacher)

    def update(self, answers: list[Scored], values: dict[str, float]) -> Sums:
        """One optimizer step on these answers; what it reports."""
        leaves = {name: rounded(weight, self.dtype).clone().requires_grad_() for name, weight in self.main.items()}
        counts = [len(a.sampled) if a.is_trained else 0 for a in answers]
        total = sum(counts)
        length = self.algo.loss_norm_length or self.config["rollout"]["max_new_tokens"]
        weights = formulas.answer_weights(counts, self.algo.loss_norm, length).tolist()
        sums = Sums(trained=total)
        for a, weight in zip(answers, weights, strict=True):
            loss = self.answer_loss(a, weight, self.current(leaves), values, sums)
            if loss.requires_grad:
                (loss / max(total, 1)).backward()
        gradients = {}
        for name, leaf in leaves.items():
            gradients[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        sums.grad_norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in gradients.values()))
        if math.isfinite(sums.grad_norm) and sums.grad_norm > 0:
            self.adam(gradients, sums.grad_norm, values["lr"])
        return sums

    def answer_loss(self, a: Scored, weight: float, weights: Weights, values: dict[str, float], sums: Sums) -> Tensor:
        """The weighed sum of an answer's token losses; its numbers go into `sums`."""
        algo = self.config["algo"]
        replay = algo["replay_routes"]
        logp, entropy = self.model.answer_logp(weights, a.row["prompt_ids"], a.row, values["temperature"], replay)
        logp, entropy = logp[a.sampled], entropy[a.sampled]
        policy, clipped = formulas.policy_loss(logp, a.old, a.advantages, self.algo)
        trainer = logp.detach() if algo["old_logp"] == "rollout" else a.old
        factor, outside = formulas.correction(trainer, a.rollout, self.algo)
        policy = policy * factor
        loss = policy - values["entropy_coef"] * entropy
        if a.ref is not None:
            for kind in ("k1", "k2", "k3"):
                sums.add(f"kl_{kind}", formulas.kl(logp.detach(), a.ref, kind))
            if algo["kl_in"] == "loss":
                loss = loss + values["kl_coef"] * formulas.kl(logp, a.ref, algo["kl"])
        sums.loss += weight * loss.double().sum().item()
        sums.policy += weight * policy.double().sum().item()
        sums.tokens += len(a.sampled)
        w = torch.exp((trainer - a.rollout).clamp(-20, 20)).detach()
        gap = (a.sampler if self.config["rollout"].get("lag", 0) else trainer) - a.rollout
        sums.gap_max = max(sums.gap_max, gap.abs().max().item())
        numbers = {"entropy": entropy, "clipped": clipped, "outside": outside, "w": w, "w2": w * w, "gap": gap.abs()}
        numbers["mismatch_k3"] = formulas.kl(a.rollout, trainer, "k3")
        for name, value in numbers.items():
            sums.add(name, value.detach())
        if replay:
            sums.routes += len(a.row["routes"]) * len(self.model.differs)
            sums.routes_differ += sum(int(layer.sum()) for layer in self.model.differs)
        return weight * loss.sum()

    @torch.no_grad()
    def adam(self, gradients: Weights, norm: float, lr: float) -> None:
        """AdamW with decoupled weight decay (arXiv 1711.05101) on clipped gradients."""
        t = self.config["train"]
        self.updates += 1
        scale = min(1.0, t["clip_grad"] / (norm + 1e-6)) if t["clip_grad"] else 1.0
        beta1, beta2 = t["adam_beta1"], t["adam_beta2"]
        for name, gradient in gradients.items():
            g = gradient * scale
            self.mean[name] = beta1 * self.mean[name] + (1 - beta1) * g
            self.square[name] = beta2 * self.square[name] + (1 - beta2) * g * g
            mean = self.mean[name] / (1 - beta1**self.updates)
            root = (self.square[name] / (1 - beta2**self.updates)).sqrt()
            self.main[name] = self.main[name] * (1 - lr * t["weight_decay"]) - lr * mean / (root + 1e-8)


def sampled_places(row: dict) -> list[int]:
    """Places in the response of the model's own tokens; turns of model and environment alternate."""
    places, start = [], 0
    for number, length in enumerate(row["turns"]):
        if number % 2 == 0:
            places += range(start, start + length)
        start += length
    return places


# ---------------------------------------------------------------- a run


def repeat(run: Recorded, comparison: Comparison) -> None:
    """Repeat every step of a run and compare all that it recorded, in the order in which a step computes it."""
    trainer = Trainer(run.config)
    initial = trainer.after[0]
    for step, metrics in enumerate(run.metrics, start=1):
        rows = run.rollouts(step)
        comparison.step = step
        values = plain.scheduled(run.config, step)
        compare_rewards(rows, metrics, run.config, comparison)
        groups = plain.trained_groups(rows, run.config, metrics["groups/rounds"])
        comparison.check("groups/trained", metrics["groups/trained"], len(groups))
        trained = [row for row in rows if row["group"] in groups]
        answers = trainer.score(trained, step, values)
        trainer.set_advantages(answers, values)
        compare_answers(answers, run.config, comparison)
        reports = []
        for chosen in plain.updates_of(trained, run.config, step):
            reports.append(trainer.update([answers[i] for i in chosen], values))
        compare_updates(reports, answers, metrics, values, run.config, comparison)
        trainer.after.append(trainer.current())
        if run.config["log"].get("tokens"):
            compare_ratios(trainer, answers, values, comparison)
        keep = run.config["rollout"].get("lag", 0) + 1
        trainer.after[:-keep] = [None] * (len(trainer.after) - keep)
        compare_export(run.folder / f"hf/step_{step:06d}", trainer, initial, comparison)


def compare_rewards(rows: list[dict], metrics: dict, config: dict, comparison: Comparison) -> None:
    """Rewards, and what is counted of the answers."""
    for row in rows:
        comparison.check("sample: reward", row["reward"], sum(row["reward_parts"].values()))
        if config["algo"]["overlong_buffer"]:
            penalty = plain.overlong_penalty(row, config)
            comparison.check("sample: overlong", row["reward_parts"]["overlong"], penalty)
    rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64)
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], set()).add(row["reward"])
    lengths = [len(sampled_places(row)) for row in rows]
    comparison.check("reward/mean", metrics["reward/mean"], rewards.mean().item())
    comparison.check("reward/std", metrics["reward/std"], rewards.std(correction=0).item())
    equal = sum(len(values) == 1 for values in groups.values())
    comparison.check("groups/zero_std_frac", metrics["groups/zero_std_frac"], equal / len(groups))
    comparison.check("groups/sampled", metrics["groups/sampled"], len(groups))
    comparison.check("tokens/response_mean", metrics["tokens/response_mean"], sum(lengths) / len(rows))
    truncated = sum(not row["finished"] for row in rows) / len(rows)
    comparison.check("tokens/truncated_frac", metrics["tokens/truncated_frac"], truncated)


def compare_answers(answers: list[Scored], config: dict, comparison: Comparison) -> None:
    """Log-probs of vLLM and trainer, and advantages, token by token."""
    for a in answers:
        comparison.check("token: rollout_logp", a.rollout, a.sampler)
        comparison.check("sample: advantage", a.row["advantage"], a.row["own_advantages"][0])
        if "advantages" in a.row:
            comparison.check("token: advantages", a.row["advantages"], a.row["own_advantages"])
        if config["log"].get("tokens"):
            comparison.check("token: trainer_logp", torch.tensor(a.row["trainer_logp"])[a.sampled], a.before)


def compare_updates(
    reports: list[Sums], answers: list[Scored], metrics: dict, values: dict, config: dict, comparison: Comparison
) -> None:
    """The metrics of the updates: most of the first, the clip's of all, vLLM's against the trainer of one epoch."""
    first = reports[0]
    count = config["train"]["updates_per_step"] if config["algo"]["old_logp"] == "trainer" else 1
    compared = reports[:count]

    def mean(name: str, over: list[Sums]) -> float:
        return sum(s.values.get(name, 0.0) for s in over) / max(sum(s.tokens for s in over), 1)

    found = {"lr": values["lr"]}
    for name in ("kl_coef", "entropy_coef", "temperature", "lr"):
        if config["schedule"][name] is not None:
            found[f"schedule/{name}"] = values[name]
    found["logp_gap/mean"] = mean("gap", compared)
    found["logp_gap/max"] = max(s.gap_max for s in compared)
    found["mismatch/k3"] = mean("mismatch_k3", compared)
    w, w2 = (sum(s.values[name] for s in compared) for name in ("w", "w2"))
    found["mismatch/ess"] = w**2 / (w2 or 1) / max(sum(s.tokens for s in compared), 1)
    found["mismatch/cut_frac"] = mean("outside", compared)
    if answers[0].ref is not None:
        found |= {"kl/ref": mean("kl_k3", [first]), "kl/k1": mean("kl_k1", [first]), "kl/k2": mean("kl_k2", [first])}
    if answers[0].teacher is not None:
        trained = [a for a in answers if a.is_trained]
        total = sum((a.old - a.teacher).double().sum().item() for a in trained)
        found["kl/teacher"] = total / max(sum(len(a.sampled) for a in trained), 1)
    found["loss/policy"] = first.policy / max(first.trained, 1)
    found["loss/total"] = first.loss / max(first.trained, 1)
    found["entropy"] = mean("entropy", [first])
    found["grad_norm"] = first.grad_norm
    found["ratio/clip_frac"] = mean("clipped", reports)
    if first.routes:
        found["routes/differ_frac"] = first.routes_differ / first.routes
    found["update/skipped"] = sum(not s.grad_norm > 0 for s in reports)
    for name, value in found.items():
        comparison.check(name, metrics[name], value)


@torch.no_grad()
def compare_ratios(trainer: Trainer, answers: list[Scored], values: dict[str, float], comparison: Comparison) -> None:
    """The ratio of each token after the updates."""
    for a in answers:
        replay = trainer.config["algo"]["replay_routes"]
        after, _ = trainer.model.answer_logp(
            trainer.after[-1], a.row["prompt_ids"], a.row, values["temperature"], replay
        )
        ratio = torch.exp(after[a.sampled] - a.before)
        comparison.check("token: ratio", torch.tensor(a.row["ratio"])[a.sampled], ratio)


def compare_export(folder: Path, trainer: Trainer, initial: Weights, comparison: Comparison) -> None:
    """The weights that the run exported after this step, if it did: their distance from ours, by how far ours moved."""
    if not folder.exists():
        return
    own = trainer.after[-1]
    theirs = read_weights(folder, trainer.dtype, trainer.model.config.tie_word_embeddings)
    if theirs.keys() != own.keys():
        comparison.check("export: tensors that only one side has", len(theirs.keys() ^ own.keys()), 0)
        return
    apart = math.sqrt(sum((theirs[name] - own[name]).double().pow(2).sum().item() for name in own))
    moved = math.sqrt(sum((initial[name] - own[name]).double().pow(2).sum().item() for name in own))
    comparison.check("export: weights", apart / moved if moved else apart, 0.0)
