"""The order of a run's prompts and, over a resume, all that its next step does, without the functions that say it."""

import json
import zlib
from collections.abc import Callable, Sequence

from config import Config, TrainingError
from support.base.read_config import dotted_items
from support.base.require import require
from support.data.prompts import Prompt, prompt_batch

IN_EPOCHS = True  # False in a fork that takes prompts otherwise, such as a curriculum
BEGIN = 10  # prompts; two shuffled epochs begin with the same ones once in 3,628,800 times
# Part of a step's plan → how the keys begin that it depends on; a part that is not here is not compared.
PLAN = {
    "step": (),
    "prompts": ("seed", "rollout.prompts_per_step"),
    "update": (
        "seed",
        "rollout.prompts_per_step",
        "rollout.group_size",
        "train.updates",
        "train.epochs_",
        "algo.max_r",
    ),
    "lr": ("train.lr", "train.warmup", "train.steps", "schedule"),
}
NEW = {"prompts_taken": 0, "config": {}, "checks": {"epochs": "{}", "plan": {}}}  # the state of a run that begins


class Order:
    """What a run has taken of `prompts`, and what its first step after a resume has to be.

    `state`: NEW, or of the checkpoint that it resumes from. A step takes its prompts as it begins to train; one that is
    stopped before takes none.
    """

    def __init__(self, prompts: Sequence[Prompt], cfg: Config, state: dict):
        self.prompts = prompts
        self.drawn: list[Prompt] = []  # by the present step so far
        self.taken = state["prompts_taken"]  # by the steps before
        checks = state.get("checks", {"epochs": "null", "plan": {}})  # an old checkpoint does not know its epoch
        self.epochs = json.loads(checks["epochs"])  # {set: [rows of its present epoch, how the one before began]}
        was, now = (dict(dotted_items(tree)) for tree in (state["config"], cfg.model_dump()))
        changed = [key for key in was | now if was.get(key) != now.get(key)]
        same = {part for part, keys in PLAN.items() if not any(key.startswith(keys) for key in changed)}
        self.planned = {part: digest for part, digest in checks["plan"].items() if part.split()[0] in same}

    def take(self, step: int, cfg: Config) -> None:
        """Count the prompts of a step. TrainingError unless each epoch of a set has each of its prompts once, in an
        order of its own; and where a resumed run takes other ones than planned.
        """
        places = [prompt.place for prompt in self.drawn]
        self.compare({"step": step, "prompts": places[: cfg.rollout.prompts_per_step], "lr": cfg.train.lr})
        self.taken += len(places)
        self.drawn = []
        if not IN_EPOCHS or self.epochs is None:
            return
        sets = getattr(self.prompts, "sets", [self.prompts])
        for number, row in places:
            rows, before = self.epochs.setdefault(str(number), [{}, []])
            if len(rows) == len(sets[number]):
                before = [*rows][:BEGIN]
                rows = {}
                self.epochs[str(number)] = [rows, before]
            again = str(row) in rows
            rows[str(row)] = None
            if len(rows) == BEGIN:
                again |= [*rows] in (before, sorted(rows, key=int))
            require(
                not again,
                f"step {step}: after {len(rows)} prompts of an epoch row {row + 1} of the data comes again, or the "
                "epoch is not shuffled, or as the one before. Is run.prompts_taken lost between steps, or at a resume? "
                "A fork that takes prompts otherwise says so in IN_EPOCHS of support/proof/order.py",
                TrainingError,
            )

    def kept(self, step: int, taken: int, cfg: Config, update_order: Callable) -> dict:
        """What a checkpoint has for the checks of a resume: the epochs so far, and checksums of what `step`, the next,
        has to sample and train with the configuration `cfg`. TrainingError if `taken`, the run's, is not the position.
        """
        require(
            taken == self.taken,
            f"a checkpoint says that the steps before step {step} took {taken} prompts; they took {self.taken}",
            TrainingError,
        )
        t, size = cfg.train, cfg.rollout.prompts_per_step
        drawn = prompt_batch(self.prompts, taken, size, cfg.seed)
        plan = {"step": step, "lr": t.lr, "prompts": [prompt.place for prompt in drawn]}
        if cfg.algo.max_rounds == 1:  # else rewards decide which groups are trained
            groups = sorted([*range(size)] * cfg.rollout.group_size)
            updates = update_order(groups, t.updates_per_step, t.epochs_per_step, cfg.seed, step)
            plan |= {f"update {number}": chosen for number, chosen in enumerate(updates)}
        return {"plan": {part: checksum(value) for part, value in plan.items()}, "epochs": json.dumps(self.epochs)}

    def compare(self, plan: dict) -> None:
        """Raise TrainingError where parts of the first step after a resume are not what its checkpoint planned."""
        other = [part for part, value in plan.items() if self.planned.pop(part, None) not in (None, checksum(value))]
        require(
            not other,
            f"the first step after a resume has another {' and '.join(other)} than the run before would have had: is "
            "it no function of configuration and step, or is the position wrong? A fork in which it is none leaves it "
            "out of PLAN in support/proof/order.py",
            TrainingError,
        )


def checksum(value: object) -> int:
    """A number that changes with a value of JSON."""
    return zlib.crc32(json.dumps(value).encode())
