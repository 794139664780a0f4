"""A run, once more: each step in the order in which it computes, and what of it agrees."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cached_property

import torch

from config import EvalConfig, RolloutConfig
from grpo.parts.base import user_code
from grpo.parts.data.prompts import Mixture, Prompt, load_prompts, load_tokenizer
from oracle import algorithm, formulas
from oracle.algorithm import seed_of
from oracle.grading import Grader
from oracle.models import end_tokens, rounded
from oracle.report import Report
from oracle.run import Recorded
from oracle.trainer import Scored, Trainer, known_loss, known_weights, losses_of, scored

HARMLESS = (  # options of vLLM and fields of Megatron-core that change memory and speed alone, or are known here
    "max_num_seqs max_num_batched_tokens enforce_eager enable_prefix_caching enable_chunked_prefill swap_space "
    "block_size kv_cache_memory_bytes disable_custom_all_reduce recompute_granularity recompute_method "
    "recompute_num_layers recompute_modules overlap_grad_reduce overlap_param_gather moe_grouped_gemm bucket_size "
    "optimizer_cpu_offload optimizer_offload_fraction num_layers_in_first_pipeline_stage adam_eps"
)
OF_UPDATE = ("loss", "entropy", "gradient", "weights")
NAMES = (  # item, key of algo, those of its names that have a formula
    ("token-weights", "loss_norm", formulas.NORMS), ("loss", "loss", formulas.LOSSES), ("loss", "kl", formulas.KLS),
    ("loss", "correction", formulas.BOUNDS),
)  # fmt: skip


def repeat(run: Recorded) -> Report:
    """Repeat the steps of a run and compare all that it recorded."""
    report = Report(run)
    repetition = Repetition(run, report)
    repetition.compare_evaluation(run.rollouts(0, "eval"))
    for step in run.steps:
        report.step = step
        repetition.repeat_step(step)
    return report


class Repetition:
    """A run with what repeats it; None or empty is what cannot be read, as the report's remarks say."""

    def __init__(self, run: Recorded, report: Report):
        self.run, self.cfg, self.report = run, run.cfg, report
        self.taken = self.updates = 0
        self.grader = Grader(run.cfg)
        self.has_moments = True  # whether the optimizer's state is the run's
        self.own = set()  # items that the checkout computes in place of formulas
        for item, key, known in NAMES:
            name = getattr(run.cfg.algo, key)
            if name not in known:
                self.own.add(item)
                report.note(item, f"yours (no formula known for algo.{key}={name})")
        self.trainer = self.read("the model or the teacher", lambda: Trainer(self.cfg))
        exports = [str(path) for path in sorted(run.folder.glob("hf/step_*"))]  # which have a tokenizer too
        folder = self.trainer.folder if self.trainer else [*exports, self.cfg.model.path][0]
        self.tokenizer = self.read("the tokenizer", lambda: load_tokenizer(folder))
        self.ends = self.read("the end tokens", lambda: end_tokens(folder, self.tokenizer)) or set()
        prompts = self.prompts_of("train")
        mixed = isinstance(prompts, Mixture)
        self.sets = prompts.sets if mixed else [prompts or []]
        self.stream = algorithm.order_of([len(p) for p in self.sets], prompts.weights if mixed else [1], self.cfg.seed)
        self.eval_prompts = self.prompts_of("eval")
        t, other = self.cfg.train, [f"megatron.{name}" for name in self.cfg.megatron if name not in HARMLESS.split()]
        is_plain = t.updates_per_step * t.epochs_per_step == 1 and self.cfg.model.dtype == "fp32"
        if self.cfg.rollout.is_cut:
            other.append("the cut of rollout.top_p or top_k, which is not in rollouts/,")
        if self.cfg.algo.replay_routes and not is_plain:
            other.append("algo.replay_routes with several updates a step, or not in fp32,")
        self.barred = ""  # why no log-prob of this run can be computed here
        if self.trainer is None:
            self.barred = "there is no model"
        elif other:
            self.barred = f"{', '.join(other)} may change what the model computes"
        self.unknown = None  # why our weights are not the run's
        if self.barred:
            self.lose(self.barred, ("log-probs", *OF_UPDATE))

    def read(self, what: str, make: Callable):
        """What `make` reads; None, and a remark, where it cannot."""
        try:
            return make()
        except Exception as error:  # of transformers, the hub, a reader of data, the user's own
            self.report.remarks.append(f"{what} cannot be read: {' '.join(str(error).split())[:160]}")
            return None

    def prompts_of(self, key: str):
        """The prompts of data.train or data.eval; None where there are none, or no tokenizer."""
        value, data = getattr(self.cfg.data, key), self.cfg.data
        if self.tokenizer is None or value is None:
            return None
        if key == "eval":  # read as a data.train of its own, so that a mistake between the two shows
            data = data.model_copy(update={"train": value, "hint_key": None})
        return self.read(f"data.{key}", lambda: load_prompts(data, self.tokenizer, 2**31 - 1))

    @cached_property
    def by_prompt(self) -> dict[tuple[int, ...], Prompt]:
        """{token ids: prompt} of the data, for groups that have another prompt than ours."""
        return {tuple(prompt.ids): prompt for prompt in itertools.chain(*self.sets)}

    def lose(self, why: str, items: tuple[str, ...]) -> None:
        """From here on our weights are not those of the run, until it exports its own."""
        self.unknown = why
        for item in items:
            self.report.note(item, f"not judged: {why}")

    # ---------------------------------------------------------------- a step

    def repeat_step(self, step: int) -> None:
        """Compare all that a step recorded, and make its updates."""
        run, cfg, report = self.run, self.cfg, self.report
        rows, metrics = run.rollouts(step), run.metrics.get(step)
        values = algorithm.scheduled(cfg, step)
        sampling = cfg.rollout.model_copy(update={"temperature": values["temperature"]})
        prompts = self.compare_order(rows)
        self.compare_answers(rows, step, sampling, cfg.rollout.max_new_tokens)
        self.compare_rewards(rows, prompts, cfg.algo.overlong_buffer)
        groups = algorithm.trained_groups(rows, cfg)
        if metrics:
            sizes = Counter(row["group"] for row in rows)
            report.check("groups", "groups/size", [*sizes.values()], [cfg.rollout.group_size] * len(sizes))
            mean = sum(row["reward"] for row in rows) / len(rows)
            report.check("rewards", "reward/mean", metrics["reward/mean"], mean)
            for name, value in (("groups/sampled", len(sizes)), ("groups/trained", len(groups))):
                report.check("groups", name, metrics[name], value)
            for name in ["lr", *(f"schedule/{name}" for name, course in cfg.schedule if course is not None)]:
                if not report.check("lr", name, metrics.get(name), values[name.removeprefix("schedule/")]):
                    values[name.removeprefix("schedule/")] = metrics.get(name, math.nan)  # the run's own
        self.update([row for row in rows if row["group"] in groups], metrics, values)
        self.updates += metrics["update/applied"] if metrics else 0
        self.compare_exports(step)
        state = run.has("checkpoints", step)
        if state:
            found = json.loads((state / "state.json").read_text())
            updates = self.updates if metrics else found["updates"]
            for name, value in (("step", step), ("prompts_taken", self.taken), ("updates", updates)):
                report.check("checkpoints", f"state: {name}", found[name], value)
        self.compare_evaluation(run.rollouts(step, "eval"))

    def compare_order(self, rows: list[dict]) -> dict[int, Prompt | None]:
        """The rows of the data that groups had, by ours; {group: its prompt, for the rewards}."""
        groups = {row["group"]: tuple(row["prompt_ids"]) for row in rows}
        self.taken += len(groups)
        if not any(map(len, self.sets)):
            self.report.note("order", "not judged: there are no data")
            return {group: self.by_prompt.get(ids) for group, ids in groups.items()}
        prompts = {}
        for group, ids in sorted(groups.items()):
            chosen, number = next(self.stream)
            prompts[group] = self.sets[chosen][number]
            problem = ""
            if tuple(prompts[group].ids) != ids:
                text = [repr(self.tokenizer.decode(given)[-40:]) for given in (ids, prompts[group].ids)]
                problem = f"group {group} has the prompt {text[0]}, not {text[1]}"
                prompts[group] = self.by_prompt.get(ids)
            self.report.say("order", problem)
        return prompts

    def compare_answers(self, rows: list[dict], step: int, sampling: RolloutConfig | EvalConfig, limit: int) -> None:
        """Of each answer: the seed of its group, what vLLM was asked, how it ended, the text that was graded."""
        report, numbers = self.report, Counter()
        for row in rows:
            seed = seed_of(self.cfg.seed, step, row["group"])
            report.say("seeds", f"{row['seed']} of group {row['group']}, not {seed}" if row["seed"] != seed else "")
            self.compare_requests(row, row["seed"], numbers[row["group"]], sampling, limit)
            numbers[row["group"]] += 1
            if self.tokenizer is None:
                report.note("answers", "not judged: there is no tokenizer")
                continue
            text = self.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
            *before, last = (self.has_ended(ids, sampling) for ids in turns_of(row)[::2])
            length, free = len(row["response_ids"]), self.cfg.rollout.turns  # the budget may cut what replies
            problem = "a turn before the last did not end" if False in before else ""
            if length > limit or (not row["finished"] and not free and length < limit):
                problem = f"it has {length} tokens, the limit is {limit}, finished is {row['finished']}"
            elif row["finished"] != last and (row["finished"] or not free):
                problem = f"finished is {row['finished']}, but the last token {row['response_ids'][-1]} says otherwise"
            elif text != row["text"]:
                problem = f"graded text is {row['text'][:40]!r}, the tokens say {text[:40]!r}"
            report.say("answers", problem and f"an answer of group {row['group']}: {problem}")

    def has_ended(self, ids: list[int], sampling: RolloutConfig | EvalConfig) -> bool:
        """Whether the last token is an end token or a stop token, or completes a stop text."""
        if ids[-1] in {*self.ends, *sampling.stop_token_ids}:
            return True
        before, whole = (self.tokenizer.decode(part) if sampling.stop else "" for part in (ids[:-1], ids))
        return any(text in whole and text not in before for text in sampling.stop)

    def compare_requests(self, row: dict, seed: int, number: int, sampling, limit: int) -> None:
        """What SamplingParams said for each turn of an answer, the `number`-th of its group."""
        if not row.get("sampling"):
            self.report.note("sampling", "not recorded")
            return
        wanted = {"temperature": sampling.temperature, "stop": sampling.stop}
        if sampling.temperature:  # else vLLM takes the likeliest token, whatever top_p and top_k say
            wanted |= {"temperature": max(sampling.temperature, 0.01), "top_p": sampling.top_p, "top_k": sampling.top_k}
        wanted["stop_token_ids"] = {*sampling.stop_token_ids, *self.ends}  # vLLM adds some of the model's own
        starts = [0, *itertools.accumulate(row["turns"])]
        first = seed + number if self.cfg.rollout.turns else seed  # without turns it is asked for the whole group
        wrong = [] if len(row["sampling"]) == len(row["turns"][::2]) else [f"{len(row['sampling'])} requests"]
        for turn, given in enumerate(row["sampling"]):
            wanted |= {"max_tokens": limit - starts[2 * turn], "seed": seed_of(seed, number, turn) if turn else first}
            given = given | {"stop_token_ids": {*given["stop_token_ids"], *self.ends}}
            asked = ((name, given.get(name), right) for name, right in wanted.items())
            wrong += [f"{name}={value}, not {right}" for name, value, right in asked if value != right]
        self.report.say("sampling", wrong and f"group {row['group']}, answer {number}: {'; '.join(wrong)}")

    # ---------------------------------------------------------------- rewards and groups

    def compare_rewards(self, rows: list[dict], prompts: dict[int, Prompt | None], buffer: int) -> None:
        """Rewards, graded anew: their parts, their sum, and the penalty on length over `buffer` tokens, 0: none."""
        for row in rows:
            given, prompt = dict(row["reward_parts"]), prompts.get(row["group"])
            self.report.check("rewards", "reward", row["reward"], sum(given.values()))
            if buffer:
                wanted = formulas.length_penalty(
                    len(row["response_ids"]), self.cfg.rollout.max_new_tokens, self.cfg.algo
                )
                self.report.check("rewards", "overlong", given.pop("overlong", None), wanted["overlong"])
            if row["graded"] != "ok":
                self.report.check("rewards", "reward of one that was not graded", sum(given.values()), 0)
            elif prompt is None:
                self.report.note("rewards", "some not graded anew: there is no row of the data with their prompt")
            else:
                turns, again = turns_of(row), f"{row['reward']:g} for {row['text'][:40]!r}"
                said = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in turns]
                found = self.grader.parts(row, prompt, said, self.has_ended(turns[-1], self.cfg.rollout))
                if isinstance(found, str) and self.grader.has_returned:
                    self.report.say("rewards", f"the run gave {again}, here: {found}")
                elif isinstance(found, str):  # it cannot run here
                    self.report.note("rewards", f"not graded anew: {found}")
                elif found.keys() != given.keys():
                    self.report.say("rewards", f"the run gave {again}, with the parts {given}, here: {found}")
                else:
                    self.report.check("rewards", f"reward, {again}", [given[name] for name in found], [*found.values()])

    # ---------------------------------------------------------------- advantages and updates

    def update(self, rows: list[dict], metrics: dict | None, values: dict[str, float]) -> None:
        """The advantages of a step and its updates; then our weights are the run's, or `unknown` says why not."""
        cfg, report, step = self.cfg, self.report, self.report.step
        answers = [scored(row, cfg) for row in rows]
        if not self.unknown:
            self.trainer.prepare(answers, values)
        answers = self.compare_advantages(answers, values)
        updates = algorithm.updates_of([a.row for a in answers], cfg, step)
        if self.unknown:
            return
        sums = self.gradient(answers, updates[0], values, self.own)
        if sums is None:
            return self.lose("the loss cannot be asked", OF_UPDATE)
        if metrics and self.compare_log_probs(answers, updates, metrics):
            sums = self.compare_first(answers, updates[0], sums, metrics, values)
        if self.unknown:
            return
        if metrics and metrics["update/applied"] not in (0, len(updates)):
            return self.lose("some updates of a step were skipped, it is not recorded which", ("weights",))
        reports = [sums]
        for number, chosen in enumerate(updates):
            if number:
                reports.append(self.gradient(answers, chosen, values, self.own))
            if self.has_moments and (not metrics or metrics["update/applied"]):
                self.trainer.step(reports[-1]["grad_norm"], values["lr"])
        if metrics and self.has_moments:
            clipped = sum(s["clipped"] for s in reports) / sum(s["tokens"] for s in reports)
            report.check("loss", "ratio/clip_frac", metrics["ratio/clip_frac"], clipped)
        if not self.has_moments:
            self.lose("the moments of AdamW are not in an export", ("weights",))

    def compare_advantages(self, answers: list[Scored], values: dict[str, float]) -> list[Scored]:
        """Set the advantages, ours or where they part the run's. Returns the answers, without those that have none."""
        algo, report = self.cfg.algo, self.report
        in_reward = algo.kl_in == "reward" and values["kl_coef"]
        found = None
        if algo.advantage not in algorithm.ADVANTAGES:
            report.note("advantages", f"yours (no formula known for algo.advantage={algo.advantage})")
        elif in_reward and (self.unknown or algo.kl not in formulas.KLS):
            report.note("advantages", f"not judged: they hold the KL, {self.unknown or 'which is yours'}")
        else:
            found = algorithm.advantages_of(answers, algo, in_reward)
            if report.compare("advantage", [a.row["advantage"] for a in answers], found).parts:
                answers, found = self.without_left_out(answers, found, in_reward)
            theirs = [a.row["advantage"] for a in answers]
            found = found if report.check("advantages", f"advantage by {algo.advantage}", theirs, found) else None
        if found is None:
            found = [a.row["advantage"] for a in answers]
        for a, advantage in zip(answers, found, strict=True):
            a.advantages = torch.full((len(a.sampled),), float(advantage))
            if a.teacher is not None:
                a.advantages = a.advantages - algo.teacher_coef * (a.old - a.teacher)
        return answers

    def without_left_out(self, answers: list[Scored], found, in_reward: float):
        """The answers and advantages where a fork trains a part of each group, and others have the advantage 0."""
        credited = {a.row["group"] for a in answers if a.row["advantage"]}
        kept = [a for a in answers if a.row["advantage"] or a.row["group"] not in credited]
        judged = [a for a in kept if a.row["advantage"]]
        theirs = [a.row["advantage"] for a in judged]
        ours = algorithm.advantages_of(judged, self.cfg.algo, in_reward)
        if len(kept) == len(answers) or self.report.compare("advantage", theirs, ours).parts:
            return answers, found
        self.report.say("updates", f"{len(answers) - len(kept)} of {len(answers)} answers have no advantage: left out")
        return kept, [a.row["advantage"] for a in kept]

    def compare_log_probs(self, answers: list[Scored], updates: list[list[int]], metrics: dict) -> bool:
        """vLLM's log-probs, and its gap to the trainer; False where our weights are not the run's."""
        cfg, report = self.cfg, self.report
        r, count = cfg.rollout, cfg.train.updates_per_step if cfg.algo.old_logp == "trainer" else 1
        compared = [answers[n] for n in sorted({n for chosen in updates[:count] for n in chosen})]
        ours, theirs = (torch.cat([getattr(a, name) for a in compared]).double() for name in ("before", "rollout"))
        found = {"logp_gap/mean": (ours - theirs).abs().mean(), "logp_gap/max": (ours - theirs).abs().max()}
        other = [f"rollout.vllm.{name}" for name in r.vllm if name not in HARMLESS.split()]
        apart = other or report.compare("token: rollout_logp", theirs, ours).parts
        gap = next((text for name in found if (text := report.compare(name, metrics[name], found[name]).parts)), "")
        if self.updates and apart and gap:
            report.say("weights", f"log-probs are not those of our weights after the step before: {gap}")
            self.lose("the weights are not ours", ("log-probs", *OF_UPDATE))
            return False
        if other:
            report.note("log-probs", f"vLLM's not judged: {', '.join(other)} may change them")
        else:
            report.check("log-probs", "token: rollout_logp", theirs, ours)
        for name, value in found.items():
            if cfg.model.match_engine:  # the run's two passes were one arithmetic; ours is a third
                report.check("log-probs", f"equal bits: {name}", metrics[name], 0.0)
            else:
                report.check("log-probs", name, metrics[name], value)
        if answers[0].teacher is not None:
            apart = torch.cat([a.old - a.teacher for a in answers if a.is_trained] or [torch.zeros(1)])
            report.check("teacher", "kl/teacher", metrics["kl/teacher"], apart.double().mean())
        return True

    def gradient(self, answers: list[Scored], chosen: list[int], values: dict, own: set[str]) -> Counter | None:
        """The gradient of an update by formulas or, for `own`, by the checkout; what it reports. None: it raised."""
        taken = [answers[n] for n in chosen]
        weights, loss = known_weights(taken, self.cfg), known_loss(self.cfg, values)
        try:
            if own:
                from oracle import fork
            if "token-weights" in own:
                weights = fork.own_weights(answers, chosen, self.cfg)
            if "loss" in own:
                loss = fork.own_loss(self.cfg, self.report.step)
            return self.trainer.gradient(taken, weights, loss, values)
        except Exception as error:  # of the checkout: a name or a field that only train_step knows
            self.report.note("updates", f"the checkout's functions cannot be asked: {user_code.last_line(error)[:160]}")
            return None

    def compare_first(
        self, answers: list[Scored], chosen: list[int], sums: Counter, metrics: dict, values: dict
    ) -> Counter:
        """The first update of a step: its loss and gradient by formulas, else by the checkout's own functions."""
        report, algo, taken = self.report, self.cfg.algo, [answers[n] for n in chosen]
        if metrics["loss/total"] is None or metrics["grad_norm"] is None:
            report.note("loss", "not judged in a step: it was NaN or infinite")
            return sums
        before = torch.cat([a.before for a in taken])
        means = {"entropy": torch.cat([a.entropy for a in taken]).mean()}
        if taken[0].ref is not None:
            means["kl/ref"] = formulas.kl(before, torch.cat([a.ref for a in taken]), "k3").mean()
        first = problems = self.misfits(losses_of(sums), metrics)
        for more in ({"token-weights"}, {"loss"}, {"token-weights", "loss"}):
            own = self.own | more
            if not problems or own == self.own:
                continue
            again = self.gradient(answers, chosen, values, own)
            if again is not None and not self.misfits(losses_of(again), metrics):
                for item in own - self.own:
                    name = algo.loss if item == "loss" else algo.loss_norm
                    report.say(item, f"differs from {name}: {first[0]}")
                self.own, sums, problems = own, again, []
        if problems:
            gap = (before - torch.cat([a.rollout for a in taken])).abs().mean()
            # With equal bits the run has no gap to compare ours with: a fifth of what rounding may make.
            least = self.report.bounds["logp_gap/"][0] / 5 if self.cfg.model.match_engine else 1e-6
            self.blame(problems, bool(self.misfits(means, metrics)), gap > 3 * metrics["logp_gap/mean"] + least)
            sums = self.gradient(answers, chosen, values, self.own)  # in place of that of the last attempt
        if not self.unknown:
            items = {"entropy": "entropy", "grad_norm": "gradient", "kl/ref": "reference"}
            for name, value in (means | losses_of(sums)).items():
                report.check(items.get(name, "loss"), name, metrics[name], value)
        return sums

    def misfits(self, found: dict[str, float], metrics: dict) -> list[str]:
        """Those of these quantities that part, in words."""
        compared = [(name, self.report.compare(name, metrics[name], value).parts) for name, value in found.items()]
        return [f"{name}: {text}" for name, text in compared if text]

    def blame(self, problems: list[str], others: bool, is_off: bool) -> None:
        """Name the item where neither formulas nor the checkout's functions give the update of the run.

        `others`: whether entropy or KL part too; `is_off`: whether our weights are farther from vLLM's than the run's.
        """
        if not problems[-1].startswith("grad_norm"):  # a number alone
            return
        item = "gradient" if len(problems) == 1 and not others else "updates"
        if self.updates and is_off:
            item = "weights"
        self.report.say(item, f"{problems[0]}, and no function of the checkout gives it")
        self.lose(f"{item} part", tuple(name for name in OF_UPDATE if name != item))

    # ---------------------------------------------------------------- what a step leaves

    def compare_exports(self, step: int) -> None:
        """The weights that the run exported after this step, and adapters: their distance from ours, by how far ours
        moved. Where ours are not the run's, those of the export become ours.
        """
        folder, adapter, trainer = self.run.has("hf", step), self.run.has("adapter", step), self.trainer
        if folder is None or self.barred:
            return
        pairs = [("weights", trainer.read(folder, trainer.dtype), trainer.current(), trainer.start())]
        if adapter is not None:
            factors = {n.removeprefix("base_model.model."): w for n, w in trainer.read(adapter, "fp32").items()}
            held = [{n: rounded(w, trainer.dtype) for n, w in own.items()} for own in (trainer.main, trainer.first)]
            pairs.append(("adapters", factors, *held))
            written = json.loads((adapter / "adapter_config.json").read_text())
            scale, own = written["lora_alpha"] / written["r"], self.run.cfg.lora.alpha / self.run.cfg.lora.rank
            self.report.say("adapters", f"alpha / r: {scale:g}, not {own:g}" if scale != own else "")
        if self.unknown:
            _, theirs, _, _ = pairs[-1]
            if trainer.main.keys() == theirs.keys():
                trainer.restart(theirs)
                self.unknown, self.has_moments = None, False
                self.report.note("weights", "taken from an export, where ours are not the run's")
            return
        for item, theirs, own, start in pairs:
            if theirs.keys() != own.keys():
                self.report.say(item, f"only one side has {sorted(theirs.keys() ^ own.keys())[:3]}")
                continue
            apart, moved = (
                math.sqrt(sum((one[name] - own[name]).double().pow(2).sum().item() for name in own))
                for one in (theirs, start)
            )
            self.report.check(item, f"export: {item}", apart / moved if moved else apart, 0.0)

    def compare_evaluation(self, rows: list[dict]) -> None:
        """The answers of the evaluation after a step, if there was one."""
        if not rows:
            return
        options, report, prompts = self.cfg.eval, self.report, dict(enumerate(self.eval_prompts or []))
        self.compare_answers(rows, 0, options, options.max_new_tokens or self.cfg.rollout.max_new_tokens)
        counts = Counter(row["group"] for row in rows)
        report.check("groups", "groups/eval.samples", [*counts.values()], [options.samples] * len(counts))
        groups = {row["group"]: row["prompt_ids"] for row in rows}
        if prompts and groups != {group: prompt.ids for group, prompt in prompts.items()}:
            report.say("order", "the prompts of an evaluation are not those of data.eval")
        self.compare_rewards(rows, prompts, buffer=0)
        plain = options.temperature and (options.top_p, options.top_k) == (1, -1) and not self.cfg.rollout.vllm
        if plain and not self.unknown:
            answers = [scored(row, self.cfg) for row in rows]
            ours, _ = self.trainer.score(answers, options.temperature)
            report.check("log-probs", "token: rollout_logp", torch.cat([a.rollout for a in answers]), torch.cat(ours))


def turns_of(row: dict) -> list[list[int]]:
    """The tokens of each turn, of model, environment, model, ..."""
    ends = zip(itertools.accumulate(row["turns"]), row["turns"], strict=True)
    return [row["response_ids"][end - length : end] for end, length in ends]
