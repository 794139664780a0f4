"""How far vLLM and the trainer disagree on the same weights: steps at a learning rate of 0, in fp32 and in bf16.

    python -m tools.mismatch                                    every family, as tiny random models; docs/mismatch.md
    python -m tools.mismatch --only qwen3_moe --steps 5         some of them; prints the table
    python -m tools.mismatch --model FOLDER --nproc 8 [--config FILE] [section.key=value ...]       a model of yours

Each row is a run of train_grpo.py on configs/tiny.yaml or FILE; models with experts run with and without the routes of
vLLM. The runs are in build/mismatch. With --keep those that an earlier call has finished are not run again. Exit code:
0 all within the bounds of rollout.max_mismatch_kl, 1 one beyond, 2 a run failed.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import transformers

sys.path.append(str(Path(__file__).resolve().parent))  # make_tiny is a script

import make_tiny

from megatron_bridge import is_moe
from support.step.gates import mismatch_bound
from tools.bench_works import facts
from tools.processes import REPO, Torchrun

FOLDER = REPO / "build/mismatch"
PAGE = REPO / "docs/mismatch.md"
STEPS = 20
SMALL = (  # 64 answers a step to prompts of the demo
    "rollout.max_new_tokens=24", "rollout.prompts_per_step=8", "rollout.group_size=8",
)  # fmt: skip
ALWAYS = (
    "train.lr=0", "train.warmup_steps=0", "train.save_every=0", "rollout.max_logp_gap=inf",
    "rollout.max_mismatch_kl=inf",
)  # fmt: skip
HEAD = """\
# Mismatch of vLLM and the trainer

Written by `python -m tools.mismatch`: {steps} steps at a learning rate of 0, so that both sides hold the same weights,
of every family as a tiny random model, on one rank ({machine}). k3 is the mismatch KL of
vLLM against the trainer, the mean over the sampled tokens; its bound is the default of `rollout.max_mismatch_kl`. |Δ|
is the difference of a token's log-probs. Routes are replayed with `algo.replay_routes`. A k3 of ±1e-10 or less is the
rounding of exp(d) - d - 1 in fp32. The same for a model of yours: `python -m tools.mismatch --model FOLDER --nproc 8`.

"""
TABLE = """\
| model | dtype | routes | mean k3 | bound | mean \\|Δ\\| | largest \\|Δ\\| | tokens |
|---|---|---|---|---|---|---|---|
"""


class Case(NamedTuple):
    """A run: a row of the table."""

    model: str
    path: Path
    dtype: str
    experts: bool
    replay: bool = False

    @property
    def folder(self) -> Path:
        return FOLDER / "-".join([self.model, self.dtype, "replayed" if self.replay else "own"])


class Measured(NamedTuple):
    """What the steps of a run gave."""

    k3: float
    mean: float
    largest: float
    tokens: int


def list_cases(name: str, path: Path) -> Iterator[Case]:
    """The runs of a model."""
    experts = is_moe(transformers.AutoConfig.from_pretrained(path))
    for dtype in ("fp32", "bf16"):
        yield Case(name, path, dtype, experts)
        if experts:
            yield Case(name, path, dtype, experts, replay=True)


def make_models(names: list[str]) -> Iterator[tuple[str, Path]]:
    """(name, folder) of tiny random models, and the prompts of the demo beside them."""
    for name in names:
        path = FOLDER / "models" / name
        make_tiny.save_model(path, make_tiny.char_tokenizer("0123456789>+-="), name, hidden=64, layers=2)
        yield make_tiny.ARCHITECTURES[name][0], path


def run(case: Case, args: argparse.Namespace) -> Measured:
    """Run a case, unless it is kept. Raises SystemExit where it fails."""
    metrics = case.folder / "metrics.jsonl"
    if not (args.keep and metrics.exists() and len(metrics.read_text().splitlines()) == args.steps):
        case.folder.mkdir(parents=True, exist_ok=True)
        overrides = [f"model.path={case.path}", f"model.dtype={case.dtype}", f"train.steps={args.steps}"]
        overrides += [f"output_dir={case.folder}", f"algo.replay_routes={str(case.replay).lower()}", *ALWAYS]
        torchrun = Torchrun(
            FOLDER / f"{case.folder.name}.txt", "train_grpo.py", "--config", args.config, *overrides, *args.overrides,
            nproc=args.nproc,
        )  # fmt: skip
        if torchrun.end(seconds=3600):
            print(torchrun.own_text[-4000:])
            raise SystemExit(2)
    return measure([json.loads(line) for line in metrics.open()])


def measure(steps: list[dict]) -> Measured:
    """The means and the largest value of the lines of a metrics.jsonl; tokens are those that the means are over."""
    answers = [step["speed/samples_per_s"] * step["time/step"] for step in steps]
    tokens = sum(number * step["tokens/response_mean"] for number, step in zip(answers, steps, strict=True))
    return Measured(
        mean(step["mismatch/k3"] for step in steps),
        mean(step["logp_gap/mean"] for step in steps),
        max(step["logp_gap/max"] for step in steps),
        round(tokens),
    )


def format_row(case: Case, found: Measured) -> str:
    """A row of the table."""
    routes = "–"
    if case.experts:
        routes = "replayed" if case.replay else "own"
    bound = mismatch_bound(case.dtype, case.experts)
    numbers = f"{found.k3:.1e} | {bound:.1e} | {found.mean:.1e} | {found.largest:.1e} | {found.tokens}"
    return f"| {case.model} | {case.dtype} | {routes} | {numbers} |"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=make_tiny.ARCHITECTURES, help="families")
    parser.add_argument("--model", type=Path, help="folder of a model, in place of the families")
    parser.add_argument("--config", default="configs/tiny.yaml")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--keep", action="store_true", help="do not run again what is finished")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    if args.model is None:
        data = FOLDER / "train.jsonl"
        FOLDER.mkdir(parents=True, exist_ok=True)
        rows = make_tiny.reversal_rows(3, 1000, seed=0)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        args.overrides = [f"data.train={data}", *SMALL, *args.overrides]
        models = make_models(args.only or list(make_tiny.ARCHITECTURES))
    else:
        models = [(re.sub(r"\W+", "-", args.model.name), args.model)]
    print(TABLE, end="")
    beyond = False
    rows = []
    for name, path in models:
        for case in list_cases(name, path):
            found = run(case, args)
            rows.append(format_row(case, found))
            beyond = beyond or not found.k3 <= mismatch_bound(case.dtype, case.experts)
            print(rows[-1], flush=True)
    if args.model is None and not args.only and args.steps == STEPS:
        head = HEAD.format(steps=args.steps, machine=facts()["machine"])
        PAGE.write_text(head + TABLE + "\n".join(rows) + "\n")
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
