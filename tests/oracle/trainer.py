"""The steps of a run, once more: from the answers that it sampled, with weights, moments and gradients of our own."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
import yaml
from torch import Tensor

from support.proof import formulas
from tests.compare_runs import read_rows
from tests.oracle import algorithm
from tests.oracle.comparison import Comparison
from tests.oracle.models import Model, end_tokens, initial_factors, merge_factors, read_weights, rounded

Weights = dict[str, Tensor]

# ---------------------------------------------------------------- what a run recorded

LEGAL = {  # values that the second trainer knows, of keys that name a branch or change log-probs
    "model.dtype": ("fp32", "bf16", "fp16"),
    "algo.advantage": ("grpo", "dr_grpo", "rloo", "grpo_loo", "max_rl", "reinforce_pp", "none"),
    "algo.loss": formulas.LOSSES,
    "algo.kl": formulas.KLS,
    "algo.correction": tuple(formulas.BOUNDS),
    "algo.loss_norm": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
    "rollout.top_p": (1,),  # else vLLM's log-probs are of a cut distribution
    "rollout.top_k": (-1,),
}
HARMLESS = (  # options of vLLM and fields of Megatron-core that change memory and speed alone
    "max_num_seqs max_num_batched_tokens enforce_eager enable_prefix_caching enable_chunked_prefill swap_space "
    "block_size kv_cache_memory_bytes disable_custom_all_reduce recompute_granularity recompute_method "
    "recompute_num_layers recompute_modules overlap_grad_reduce overlap_param_gather moe_grouped_gemm bucket_size "
    "optimizer_cpu_offload optimizer_offload_fraction num_layers_in_first_pipeline_stage"
)


@dataclass
class Recorded:
    """The output folder of a run that can be repeated."""

    folder: Path
    config: dict
    metrics: list[dict]  # of each step, without lines of evaluations before the first

    def rollouts(self, step: int) -> list[dict]:
        """The answers of a step."""
        return read_rows(self.folder / f"rollouts/step_{step:06d}.jsonl")


def read_run(folder: Path) -> Recorded:
    """What the run in this output folder recorded. Raises ValueError: why it cannot be repeated."""
    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder} has no config.yaml; give the output_dir of a run")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    check_options(config)
    if not any(Path(config["model"]["path"]).glob("*.safetensors")):
        raise ValueError(f"{config['model']['path']}: no folder with safetensors; run with the folder of the model")
    metrics = [line for line in read_rows(folder / "metrics.jsonl") if line["step"] > 0]
    steps = [line["step"] for line in metrics]
    if steps != list(range(1, len(steps) + 1)):
        raise ValueError(f"metrics.jsonl has steps {steps[:3]} ... {steps[-3:]}: every step from 1 is needed once")
    if any(line["loss/total"] is None or line["grad_norm"] is None for line in metrics):
        raise ValueError("an update with a NaN or infinite loss or gradient cannot be repeated")
    return Recorded(folder, config, metrics)


def check_options(config: dict) -> None:
    """Refuse values that the second trainer does not know, and options that may make other log-probs than its own."""
    for key, legal in LEGAL.items():
        section, name = key.split(".")
        if config[section][name] not in legal:
            raise ValueError(f"{key}={config[section][name]}: the second trainer knows {', '.join(map(str, legal))}")
    options = {f"rollout.vllm.{name}" for name in config["rollout"]["vllm"].keys() - HARMLESS.split()}
    options |= {f"megatron.{name}" for name in config["megatron"].keys() - HARMLESS.split()}
    if options:
        raise ValueError(f"{', '.join(sorted(options))}: an option that may change log-probs, which cannot be repeated")
    t = config["train"]
    several = t["updates_per_step"] * t["epochs_per_step"] > 1
    if config["algo"]["replay_routes"] and (several or config["model"]["dtype"] != "fp32"):
        raise ValueError("algo.replay_routes=true: our routers route as vLLM only with one update a step in fp32")


# ---------------------------------------------------------------- the trainer


@dataclass
class Scored:
    """One answer of a step, with all that its loss needs; tensors are [tokens that the model sampled]."""

    row: dict  # of rollouts/
    sampled: list[int]  # places in the response of the tokens that the model sampled
    is_trained: bool
    rollout: Tensor  # log-probs by vLLM
    before: Tensor  # by the policy before the step's first update
    old: Tensor  # those of the ratio
    ref: Tensor | None = None
    teacher: Tensor | None = None
    advantage: float = 0.0
    advantages: Tensor | None = None


class Trainer:
    """The policy with its optimizer, and the other sets of weights of a run."""

    def __init__(self, config: dict):
        self.config = config
        self.algo = SimpleNamespace(**config["algo"])  # as the formulas want it
        self.dtype = config["model"]["dtype"]
        folder = config["model"]["path"]
        self.model = Model(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.ends = end_tokens(folder, self.tokenizer)
        tied = self.model.config.tie_word_embeddings
        self.frozen: Weights = {}
        self.main = read_weights(folder, "fp32", tied)  # what is trained
        if config["lora"]["rank"]:
            self.frozen = read_weights(folder, self.dtype, tied)
            self.main = initial_factors(self.frozen, config["lora"])
        t = config["train"]
        betas = (t["adam_beta1"], t["adam_beta2"])
        self.optimizer = torch.optim.AdamW(self.main.values(), betas=betas, weight_decay=t["weight_decay"])
        self.reference = {name: weight.clone() for name, weight in self.current().items()}
        self.teacher, self.teacher_weights = None, None
        if self.algo.teacher not in (None, "self"):
            self.teacher = Model(self.algo.teacher)
            tied = self.teacher.config.tie_word_embeddings
            self.teacher_weights = read_weights(self.algo.teacher, self.dtype, tied)

    def current(self, leaves: Weights | None = None) -> Weights:
        """The weights that the model computes with; with `leaves` as a function of these, in place of our own."""
        values = leaves or {name: rounded(weight, self.dtype) for name, weight in self.main.items()}
        if not self.frozen:
            return values
        return merge_factors(self.frozen, values, self.config["lora"], self.dtype)

    def has_ended(self, ids: list[int], options: dict) -> bool:
        """Whether the last token is an end token or a stop token, or completes a stop text, by options of sampling."""
        if ids[-1] in {*self.ends, *options["stop_token_ids"]}:
            return True
        before, whole = self.tokenizer.decode(ids[:-1]), self.tokenizer.decode(ids)
        return any(text in whole and text not in before for text in options["stop"])

    @torch.no_grad()
    def score(self, answers: list[dict], values: dict[str, float]) -> list[Scored]:
        """The answers that the step trains on, with log-probs by each set of weights that it uses."""
        weights = self.current()
        scored = []
        for row in answers:
            prompt, asked = row["prompt_ids"], row.get("asked") or row["prompt_ids"]
            places = sampled_places(row)
            is_trained = row["finished"] or not self.algo.mask_truncated
            rollout = torch.tensor(row["rollout_logp"])[places]

            def logp(model, weights, prompt, row=row, places=places):
                return model.answer_logp(weights, prompt, row, values["temperature"])[0][places]

            before = logp(self.model, weights, prompt)
            old = rollout if self.algo.old_logp == "rollout" else before
            answer = Scored(row, places, is_trained, rollout, before, old)
            if self.algo.kl_coef:
                answer.ref = logp(self.model, self.reference, prompt)
            if self.algo.teacher == "self":
                answer.teacher = logp(self.model, weights, asked)
            elif self.algo.teacher:
                answer.teacher = logp(self.teacher, self.teacher_weights, asked)
            scored.append(answer)
        return scored

    def set_advantages(self, answers: list[Scored], values: dict[str, float]) -> None:
        """Set the advantages of the answers."""
        rewards = [a.row["reward"] for a in answers]
        if self.algo.kl_in == "reward" and values["kl_coef"]:
            for i, a in enumerate(answers):
                rewards[i] -= values["kl_coef"] * formulas.kl(a.old, a.ref, self.algo.kl).double().sum().item()
        tokens = [len(a.sampled) if a.is_trained else 0 for a in answers]
        found = algorithm.advantages_of([a.row for a in answers], rewards, tokens, self.algo.advantage)
        for a, advantage in zip(answers, found.tolist(), strict=True):
            a.advantage = advantage
            a.advantages = torch.full_like(a.old, advantage)
            if a.teacher is not None:
                a.advantages = a.advantages - self.algo.teacher_coef * (a.old - a.teacher)

    def update(self, answers: list[Scored], values: dict[str, float]) -> Counter:
        """One optimizer step on these answers; sums over their tokens of what it reports."""
        leaves = {name: rounded(weight, self.dtype).clone().requires_grad_() for name, weight in self.main.items()}
        counts = [len(a.sampled) if a.is_trained else 0 for a in answers]
        length = self.algo.loss_norm_length or self.config["rollout"]["max_new_tokens"]
        weights = formulas.answer_weights(counts, self.algo.loss_norm, length).tolist()
        sums = Counter(trained=sum(counts))
        for a, weight in zip(answers, weights, strict=True):
            loss = self.answer_loss(a, weight, self.current(leaves), values, sums)
            if loss.requires_grad:
                (loss / max(sum(counts), 1)).backward()
        for name, weight in self.main.items():
            weight.grad = torch.zeros_like(weight) if leaves[name].grad is None else leaves[name].grad
        clip = self.config["train"]["clip_grad"] or math.inf
        sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(self.main.values(), clip).item()
        if sums["grad_norm"] > 0:
            self.optimizer.param_groups[0]["lr"] = values["lr"]
            self.optimizer.step()
        return sums

    def answer_loss(self, a: Scored, weight: float, weights: Weights, values: dict[str, float], sums: Counter):
        """The weighed sum of an answer's token losses; its numbers go into `sums`."""
        logp, entropy = self.model.answer_logp(weights, a.row["prompt_ids"], a.row, values["temperature"])
        logp, entropy = logp[a.sampled], entropy[a.sampled]
        policy, clipped = formulas.policy_loss(logp, a.old, a.advantages, self.algo)
        trainer = logp.detach() if self.algo.old_logp == "rollout" else a.old
        factor, outside = formulas.correction(trainer, a.rollout, self.algo)
        policy = policy * factor
        loss = policy - values["entropy_coef"] * entropy
        w = torch.exp((trainer - a.rollout).clamp(-20, 20))
        gap = (trainer - a.rollout).abs()
        numbers = {"entropy": entropy, "clipped": clipped, "outside": outside, "w": w, "w2": w * w, "gap": gap}
        numbers["mismatch_k3"] = formulas.kl(a.rollout, trainer, "k3")
        if a.ref is not None:
            numbers |= {f"kl_{kind}": formulas.kl(logp, a.ref, kind) for kind in ("k1", "k2", "k3")}
            if self.algo.kl_in == "loss":
                loss = loss + values["kl_coef"] * formulas.kl(logp, a.ref, self.algo.kl)
        numbers |= {"loss": weight * loss, "policy": weight * policy}
        for name, value in numbers.items():
            sums[name] += value.detach().double().sum().item()
        sums["tokens"] += len(a.sampled)
        sums["gap_max"] = max(sums["gap_max"], gap.max().item())
        return weight * loss.sum()


def sampled_places(row: dict) -> list[int]:
    """Places in the response of the model's own tokens; turns of model and environment alternate."""
    places, start = [], 0
    for number, length in enumerate(row["turns"]):
        if number % 2 == 0:
            places += range(start, start + length)
        start += length
    return places


# ---------------------------------------------------------------- a run


def repeat(run: Recorded, bounds: dict | None = None) -> Comparison:
    """Repeat every step of a run and compare all that it recorded, in the order in which a step computes it.

    `bounds` replace those of comparison.BOUNDS.
    """
    comparison = Comparison(run.config["model"]["dtype"], bounds)
    trainer = Trainer(run.config)
    for step, metrics in enumerate(run.metrics, start=1):
        rows = run.rollouts(step)
        comparison.step = step
        values = algorithm.scheduled(run.config, step)
        compare_answers(rows, step, run.config, "rollout", trainer, comparison)
        compare_rewards(rows, metrics, run.config, comparison)
        groups = algorithm.trained_groups(rows, run.config, metrics["groups/rounds"])
        comparison.check("groups/trained", metrics["groups/trained"], len(groups))
        trained = [row for row in rows if row["group"] in groups]
        answers = trainer.score(trained, values)
        trainer.set_advantages(answers, values)
        for a in answers:
            comparison.check("token: rollout_logp", a.rollout, a.before)
            comparison.check("sample: advantage", a.row["advantage"], a.advantage)
        updates = algorithm.updates_of(trained, run.config, step)
        reports = [trainer.update([answers[i] for i in chosen], values) for chosen in updates]
        compare_updates(reports, answers, metrics, values, run.config, comparison)
        compare_export(run.folder / f"hf/step_{step:06d}", trainer, comparison)
        compare_evaluation(run.folder / f"rollouts/eval_{step:06d}.jsonl", run.config, trainer, comparison)
    return comparison


def compare_answers(
    rows: list[dict], step: int, config: dict, section: str, trainer: Trainer, comparison: Comparison
) -> None:
    """Of each answer: the seed of its group, how it ended, what was graded, and that a failed one has no reward.

    The text is that of the very tokens, so a token that was dropped or put in shows too.
    """
    for row in rows:
        seed = np.random.SeedSequence([config["seed"], step, row["group"]]).generate_state(1)[0]
        comparison.check("answer: seed", row["seed"], int(seed))
        text = trainer.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        comparison.check("answer: graded text is not that of the tokens", row["text"] != text, False)
        if row["graded"] != "ok":
            comparison.check("answer: reward of one that was not graded", row["reward"], 0)
        parts = zip(itertools.accumulate(row["turns"]), row["turns"], strict=True)
        answers = [row["response_ids"][end - length : end] for end, length in parts][::2]
        *before, last = (trainer.has_ended(ids, config[section]) for ids in answers)
        comparison.check("answer: turns before the last that did not end", before.count(False), 0)
        if row["finished"] or config["rollout"]["turns"] is None:  # the budget may also cut what replies to an answer
            comparison.check("answer: finished", row["finished"], last)


def compare_evaluation(path: Path, config: dict, trainer: Trainer, comparison: Comparison) -> None:
    """The answers of the evaluation after a step, if there was one: how many, how long, by which temperature."""
    if not path.exists():
        return
    rows, options = read_rows(path), config["eval"]
    compare_answers(rows, 0, config, "eval", trainer, comparison)
    limit = options["max_new_tokens"] or config["rollout"]["max_new_tokens"]
    for row in rows:
        comparison.check("answer: tokens beyond eval.max_new_tokens", max(len(row["response_ids"]) - limit, 0), 0)
        if options["temperature"] and (options["top_p"], options["top_k"]) == (1, -1):
            logp, _ = trainer.model.answer_logp(trainer.current(), row["prompt_ids"], row, options["temperature"])
            places = sampled_places(row)
            comparison.check("token: rollout_logp", torch.tensor(row["rollout_logp"])[places], logp[places].detach())
    for count in Counter(row["group"] for row in rows).values():
        comparison.check("answer: number of a prompt's in an evaluation", count, options["samples"])


def compare_rewards(rows: list[dict], metrics: dict, config: dict, comparison: Comparison) -> None:
    """Rewards, and what is counted of the answers."""
    groups = {}
    for row in rows:
        comparison.check("sample: reward", row["reward"], sum(row["reward_parts"].values()))
        if config["algo"]["overlong_buffer"]:
            limit = config["rollout"]["max_new_tokens"]
            penalty = formulas.length_penalty(len(row["response_ids"]), limit, SimpleNamespace(**config["algo"]))
            comparison.check("sample: overlong", row["reward_parts"]["overlong"], penalty["overlong"])
        groups.setdefault(row["group"], set()).add(row["reward"])
    rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64)
    found = {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "groups/zero_std_frac": sum(len(values) == 1 for values in groups.values()) / len(groups),
        "groups/sampled": len(groups),
        "tokens/response_mean": sum(len(sampled_places(row)) for row in rows) / len(rows),
        "tokens/truncated_frac": sum(not row["finished"] for row in rows) / len(rows),
    }
    if config["rollout"]["turns"]:
        others = sum(len(row["response_ids"]) - len(sampled_places(row)) for row in rows)
        found["tokens/environment_mean"] = others / len(rows)
        found["turns/mean"] = sum(len(row["turns"][::2]) for row in rows) / len(rows)
    for name, value in found.items():
        comparison.check(name, metrics[name], value)


def compare_updates(
    reports: list[Counter], answers: list[Scored], metrics: dict, values: dict, config: dict, comparison: Comparison
) -> None:
    """The metrics of the updates: most of the first, the clip's of all, vLLM's against the trainer of one epoch."""
    first = reports[0]
    count = config["train"]["updates_per_step"] if config["algo"]["old_logp"] == "trainer" else 1
    compared = reports[:count]

    def mean(name: str, sums: list[Counter]) -> float:
        return sum(s[name] for s in sums) / max(sum(s["tokens"] for s in sums), 1)

    w, w2, tokens = (sum(s[name] for s in compared) for name in ("w", "w2", "tokens"))
    found = {
        "lr": values["lr"],
        **{f"schedule/{name}": values[name] for name, course in config["schedule"].items() if course is not None},
        "logp_gap/mean": mean("gap", compared),
        "logp_gap/max": max(s["gap_max"] for s in compared),
        "mismatch/k3": mean("mismatch_k3", compared),
        "mismatch/ess": w**2 / (w2 or 1) / max(tokens, 1),
        "mismatch/cut_frac": mean("outside", compared),
    }
    if answers[0].ref is not None:
        found |= {"kl/ref": mean("kl_k3", [first]), "kl/k1": mean("kl_k1", [first]), "kl/k2": mean("kl_k2", [first])}
    if answers[0].teacher is not None:
        trained = [a for a in answers if a.is_trained]
        total = sum((a.old - a.teacher).double().sum().item() for a in trained)
        found["kl/teacher"] = total / max(sum(len(a.sampled) for a in trained), 1)
    found |= {
        "loss/policy": first["policy"] / max(first["trained"], 1),
        "loss/total": first["loss"] / max(first["trained"], 1),
        "entropy": mean("entropy", [first]),
        "grad_norm": first["grad_norm"],
        "ratio/clip_frac": mean("clipped", reports),
        "update/skipped": sum(not s["grad_norm"] > 0 for s in reports),
    }
    if config["algo"]["replay_routes"]:
        found["routes/differ_frac"] = 0.0
    for name, value in found.items():
        comparison.check(name, metrics[name], value)


def compare_export(folder: Path, trainer: Trainer, comparison: Comparison) -> None:
    """The weights that the run exported after this step, if it did: their distance from ours, by how far ours moved."""
    if not folder.exists():
        return
    own = trainer.current()
    theirs = read_weights(folder, trainer.dtype, trainer.model.config.tie_word_embeddings)
    if theirs.keys() != own.keys():
        comparison.check("export: tensors that only one side has", len(theirs.keys() ^ own.keys()), 0)
        return
    apart = math.sqrt(sum((theirs[name] - own[name]).double().pow(2).sum().item() for name in own))
    moved = math.sqrt(sum((trainer.reference[name] - own[name]).double().pow(2).sum().item() for name in own))
    comparison.check("export: weights", apart / moved if moved else apart, 0.0)
