"""Whether rewards could be computed: failures of reward functions and programs, names that apply to no answer."""

import json
from dataclasses import dataclass, field

import torch.distributed as dist

from config import Config, TrainingError, UserError
from support.base.require import require
from support.data.prompts import Prompt, load_set
from support.proof import rows
from support.step import turns
from support.step.grading import checksum
from support.step.metrics import by_source
from support.step.records import Sample


@dataclass
class RewardChecks:
    """The checks of a run's rewards, which an evaluation without a trainer has too."""

    inputs: object  # support.run.inputs.Inputs: tokenizer, prompts, and the checkpoint that this start resumed from
    errors_shown: set[str] = field(default_factory=set, kw_only=True)  # kinds of errors; rewards known to apply
    evaluates: int | None = field(default=None, kw_only=True)  # checksum of data.eval, read again

    def evaluated(self, samples: list[Sample], prompts: dict[int, Prompt], cfg: Config) -> None:
        """The checks of an evaluation: all of data.eval, its own number of answers, what vLLM was asked, rewards."""
        self.rewards(samples, prompts, cfg)
        rows.check_sizes(samples, cfg.eval.samples, "eval.samples")
        rows.check_requests(0, samples, prompts, cfg.eval, cfg, self.inputs.ends.own)
        if self.evaluates is None:
            data = cfg.data.model_copy(update={"hint_key": None})
            read = load_set(data.eval, data, self.inputs.tokenizer, self.inputs.vocab_size, "data.eval")
            self.evaluates = checksum([(p.ids, p.answer, p.source) for p in read])
        answered = [prompts[group] for group in sorted({s.group for s in samples})]
        require(
            checksum([(p.ids, p.answer, p.source) for p in answered]) == self.evaluates,
            f"the {len(answered)} prompts of an evaluation are not those of data.eval={cfg.data.eval}. A fork that "
            "takes others says so in evaluated of support/proof/graded.py",
            TrainingError,
        )

    def rewards(self, samples: list[Sample], prompts: dict[int, Prompt], cfg: Config) -> None:
        """Raise UserError, on every rank, if the reward failed for too many samples; else warn once a kind of error."""
        reward, shown = cfg.reward, self.errors_shown
        for s in samples:
            rows.check_reward(s, cfg, penalty={})
        failed = [s for s in samples if s.graded == "error"]
        messages = {}  # {kind of an error: of its first sample}
        for s in failed:
            what = "" if s.error.startswith(turns.FAILED) else f"the reward of source {s.source!r} failed: "
            row = json.dumps(prompts[s.group].row, default=str)
            kind = s.error.partition(":")[0]
            messages.setdefault(kind, f"{what}{s.error}\n  row: {row}\n  response: {s.text!r}")
        if len(failed) > reward.max_error_frac * len(samples):
            raise UserError(
                f"{next(iter(messages.values()))}\n  {len(failed)} of {len(samples)} samples failed, more than "
                f"reward.max_error_frac={reward.max_error_frac:g} allows; mend the function or the row, or choose "
                "another reward for the source (reward.by_source)"
            )
        for kind, message in messages.items():
            if kind not in shown and dist.get_rank() == 0:
                print(f"warning: {message}\n  it counts as reward 0, as do further ones of this kind", flush=True)
        shown.update(messages)
        for source, own in by_source([s for s in samples if s.graded == "ok"]).items():
            spec = reward.by_source.get(source, reward.default)
            if isinstance(spec, str) or f"rewards of {source!r}" in shown:  # a single None is an error already
                continue
            unused = [name for name in spec if all(part is None for s in own for part in s.raw[name].values())]
            if unused:
                raise UserError(
                    f"the reward {unused[0]!r} of source {source!r} is None for all {len(own)} answers; legal is a "
                    "finite number for those to which it applies. Leave it out of the reward, or give rows that it is "
                    "not for a source of their own (reward.by_source)"
                )
            shown.add(f"rewards of {source!r}")
