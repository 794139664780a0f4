"""What repeats a run: its data, its model, and what is known of its weights so far."""

import itertools
from functools import cached_property
from pathlib import Path

import transformers

from oracle import algorithm, formulas
from oracle.data import files_of, read_sets
from oracle.grading import Grader
from oracle.models import end_tokens
from oracle.report import Report
from oracle.run import Recorded
from oracle.sampling import Bets
from oracle.trainer import Trainer

# Options of vLLM with which it computes other log-probs than the trainer.
ROUNDS_OTHERWISE = ("quantization", "kv_cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype")
OF_UPDATE = ("reference", "teacher", "loss", "entropy", "gradient", "weights", "adapters")
NAMES = (  # item, key of algo, its names that have a formula
    ("token-weights", "loss_norm", formulas.NORMS), ("loss", "loss", formulas.LOSSES),
    ("loss", "kl", (*formulas.KLS, "full")),
    ("loss", "correction", formulas.BOUNDS),
)  # fmt: skip


class State:
    """A run with what repeats it. A part that cannot be read is None or empty, and a remark of the report says why."""

    def __init__(self, run: Recorded, report: Report):
        self.run = run
        self.cfg = run.cfg  # in each step with the values of that step
        self.report = report
        self.metrics = None  # of the step, as the run has them
        self.lines = None  # of the step's updates, in a run that records them
        self.taken = self.updates = 0  # prompts, and the optimizer's updates, so far
        self.grader = Grader(run.cfg)
        self.own = set()  # items that the checkout computes in place of formulas
        for item, key, known in NAMES:
            name = getattr(run.cfg.algo, key)
            if name not in known:
                self.own.add(item)
                report.note(item, f"no formula for algo.{key}={name}")

        # The model and its tokenizer, which exports have too.
        self.trainer = self.read("the model or the teacher", lambda: Trainer(self.cfg))
        folders = [str(path) for path in sorted(run.folder.glob("hf/step_*"))] + [self.cfg.model.path]
        folder = self.trainer.folder if self.trainer else folders[0]
        self.tokenizer = self.read("the tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(folder))
        self.ends = self.read("the end tokens", lambda: end_tokens(folder, self.tokenizer)) or set()
        if self.trainer:
            self.trainer.ends = self.ends
        self.bets = Bets()

        # The data.
        weights, self.sets = zip(*self.read_data("train"), strict=True)
        self.stream = algorithm.order_of([len(each) for each in self.sets], weights, self.cfg.seed)
        ((_, self.eval_prompts),) = self.read_data("eval")
        written = (run.folder / "rollouts/step_000001.jsonl").stat().st_mtime
        late = [file for file in files_of(self.cfg.data) if Path(file).stat().st_mtime > written]
        self.late = f"{late[0]} is newer than the answers of step 1" if late else ""

        # What is known of the run's weights.
        self.has_moments = not report.unknown  # whether our optimizer made all updates
        self.unknown = ""  # why our weights are not the run's
        self.doubt = ""  # the item by which an update since the last export was not ours
        self.theirs = set()  # tensors that move otherwise than ours; each export gives their values
        self.scale = None  # of the loss in the update before, in fp16, and whether that overflowed
        self.rounding = 0.0  # how far it moved a log-prob before the first update, in half precision
        self.nuclei = None  # of the step's answers, as nuclei.fill_nuclei returns them
        if self.trainer is None:
            self.lose("there is no model", ("log-probs", *OF_UPDATE))

    def read(self, what, make):
        """What `make` reads; None, and a remark, where it cannot."""
        try:
            return make()
        except Exception as error:  # of transformers, the hub, a reader of data, the user's own
            self.report.remarks.append(f"{what} cannot be read: {' '.join(str(error).split())[:160]}")

    def read_data(self, key):
        """(weight, prompts) of each set of data.train or data.eval; an empty one without data or tokenizer."""
        found = None
        if self.tokenizer is not None and getattr(self.cfg.data, key) is not None:
            found = self.read(f"data.{key}", lambda: read_sets(self.cfg.data, key, self.tokenizer))
        return found or [(1, [])]

    @cached_property
    def by_prompt(self):
        """{token ids: prompt} of the data, for groups that have another prompt than ours."""
        return {tuple(prompt.ids): prompt for prompt in itertools.chain(*self.sets)}

    def lose(self, why, items):
        """From here on our weights are not the run's, until it exports its own, and the optimizer's moments unknown."""
        self.has_moments = False
        self.unknown = why
        for item in items:
            self.report.note(item, why)

    def part(self, items):
        """From here on our weights are not the run's, until it exports its own, but go on by their own updates."""
        moments = self.has_moments
        self.lose(f"after an update with another {self.doubt}" if self.doubt else "the weights are not ours", items)
        self.has_moments = moments
