"""The order of a run's prompts and, over a resume, all that its next step does, without the functions that say it."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np

from config import Config, TrainingError
from support.base.require import require
from support.data.prompts import Prompt, prompt_batch
from support.step.grading import checksum

IN_EPOCHS = True  # False in a fork that takes prompts otherwise, such as a curriculum
BEGIN = 10  # prompts; two shuffled epochs begin with the same ones once in 3,628,800 times
# The keys that the next step's plan depends on: a resume that changes one of them is not compared with it.
PLANNED_BY = {
    "seed": True, "schedule": True, "rollout": {"prompts_per_step", "group_size"}, "algo": {"max_rounds"},
    "train": {"lr", "warmup_steps", "updates_per_step", "epochs_per_step"},
}  # fmt: skip


class Order:
    """What a run has taken of `prompts`, and what its first step after a resume, given its `state`, has to be."""

    def __init__(self, prompts: Sequence[Prompt], cfg: Config, state: dict):
        self.prompts = prompts
        self.sets = getattr(prompts, "sets", [prompts])
        self.epoch_of = [np.full(len(part.table), -1, "i4") for part in self.sets]  # of each row, since this start
        self.drawn: list[Prompt] = []  # by the present step so far
        # Of each set: prompts taken, the sum of their rows, the rows that epochs begin with, after those in the files.
        epochs = [{"taken": 0, "sum": 0, "begins": part.rows[:BEGIN].tolist()} for part in self.sets]
        # An old checkpoint has no checks, and does not know its epoch.
        checks = state.get("checks", {"given": 0, "plan": {}, "epochs": None if state else epochs})
        self.epochs = checks["epochs"] if IN_EPOCHS else None
        steps = cfg.train.steps if any(course for _, course in cfg.schedule) else 0
        self.given = checksum(cfg.model_dump(include=PLANNED_BY), steps)
        self.planned = checks["plan"] if checks["given"] == self.given else {}

    def take(self, step: int, cfg: Config) -> None:
        """Count the prompts of a step, as it begins to train. TrainingError unless each epoch of a set has each of its
        prompts once, in an order of its own; and where a resumed run takes other ones than planned.
        """
        places = [prompt.place for prompt in self.drawn]
        self.compare({"step": step, "prompts": places[: cfg.rollout.prompts_per_step], "lr": cfg.train.lr})
        self.drawn = []
        if self.epochs is None:
            return
        for number, row in places:
            prompts = self.sets[number]
            of_set = self.epochs[number]
            epoch, before = divmod(of_set["taken"], len(prompts))
            again = self.epoch_of[number][row] == epoch
            self.epoch_of[number][row] = epoch
            of_set["taken"] += 1
            of_set["sum"] += row
            if before < BEGIN:
                of_set["begins"] = [*of_set["begins"], row][-2 * BEGIN :]
            if before == BEGIN - 1:
                again |= of_set["begins"][:BEGIN] == of_set["begins"][BEGIN:]
            if before == len(prompts) - 1:  # one that came before this start, too
                again |= of_set["sum"] != (epoch + 1) * prompts.rows.sum()
            if again:
                raise TrainingError(
                    f"step {step}: after {before} prompts of an epoch row {row + 1} of the data comes again, or the "
                    "epoch is not shuffled, or as the one before, or at its end lacks a row. Is run.prompts_taken "
                    "lost between steps, or at a resume? A fork that takes prompts otherwise says so in IN_EPOCHS of "
                    "support/proof/order.py"
                )

    def kept(self, step: int, taken: int, cfg: Config, update_order: Callable) -> dict:
        """What a checkpoint has for the checks of a resume: counts of the epochs, and checksums of what `step`, the
        next, has to do with the configuration `cfg`. TrainingError if `taken`, the run's, is not the position.
        """
        counted = taken if self.epochs is None else sum(of_set["taken"] for of_set in self.epochs)
        require(
            taken == counted,
            f"a checkpoint says that the steps before step {step} took {taken} prompts; they took {counted}",
            TrainingError,
        )
        t, size = cfg.train, cfg.rollout.prompts_per_step
        drawn = prompt_batch(self.prompts, taken, size, cfg.seed)
        plan = {"step": step, "lr": t.lr, "prompts": [prompt.place for prompt in drawn]}
        if cfg.algo.max_rounds == 1:  # else rewards decide which groups are trained
            groups = sorted([*range(size)] * cfg.rollout.group_size)
            updates = update_order(groups, t.updates_per_step, t.epochs_per_step, cfg.seed, step)
            plan |= {f"update {number}": chosen for number, chosen in enumerate(updates)}
        checksums = {part: checksum(value) for part, value in plan.items()}
        return {"given": self.given, "plan": checksums, "epochs": deepcopy(self.epochs)}

    def compare(self, plan: dict) -> None:
        """Raise TrainingError where parts of the first step after a resume are not what its checkpoint planned."""
        other = [part for part, value in plan.items() if self.planned.pop(part, None) not in (None, checksum(value))]
        require(
            not other,
            f"the first step after a resume has another {' and '.join(other)} than the run before would have had: is "
            "it no function of configuration and step, or is the position wrong? A fork in which it is none leaves it "
            "out of the plan in kept of support/proof/order.py",
            TrainingError,
        )
