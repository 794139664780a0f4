"""Write the tables of docs/training-recipes.md: what each recipe takes of four GPUs, memory and seconds, as planned.

    python -m tools.recipes

Memory is the plan of `--dry-run`; seconds are those of tools/plan_times.py. Nothing here was measured on a GPU.
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tools"))
import plan_times  # noqa: E402
from plan_times import CARDS, Card, Lengths  # noqa: E402

from benchmarks import works as bench_works  # noqa: E402
from config import Config  # noqa: E402
from support.base.read_config import load_config  # noqa: E402
from support.check import memory_plan  # noqa: E402
from tools import plans  # noqa: E402

PAGE = REPO / "docs/training-recipes.md"
PHASES = ("build", "rollout", "logprob", "train", "sync", "save")


@dataclass(frozen=True)
class Recipe:
    """What a plan assumes of a file of configs/: mean lengths, and the prompts of data.eval."""

    lengths: Lengths
    eval_prompts: int


GSM8K, MATH, THINKING_OFF = Lengths(130, 200), Lengths(180, 500), Lengths(180, 900)
RECIPES = {
    "qwen2.5_0.5b_1gpu": Recipe(GSM8K, 1319),
    "qwen2.5_1.5b_1gpu": Recipe(GSM8K, 1319),
    "qwen2.5_1.5b_lora_1gpu": Recipe(GSM8K, 1319),
    "qwen2.5_distill_1gpu": Recipe(MATH, 500),
    "qwen7b": Recipe(Lengths(130, 250), 1319),
    "qwen2.5_7b_tools": Recipe(Lengths(250, 700), 500),
    "qwen2.5_14b": Recipe(MATH, 500),
    "qwen2.5_32b": Recipe(MATH, 500),
    "qwen2.5_72b": Recipe(MATH, 500),
    "qwen3_30b_a3b": Recipe(THINKING_OFF, 500),
    "qwen3_235b_a22b": Recipe(THINKING_OFF, 500),
}
HEAD = (
    f"| GPU | {' | '.join(PHASES)} | sample | log-probs | train | push | step | {{steps}} steps | evaluation |\n"
    f"|---{'|---' * (len(PHASES) + 7)}|\n"
)


def shape_of(name: str | None) -> dict | None:
    """The entries of config.json of a model of the hub; None for none."""
    return None if name is None else bench_works.MODELS[plans.SHAPES[name]]


def card_row(cfg: Config, named: Config, gpus: int, card: Card, recipe: Recipe, held: dict | None) -> tuple[str, dict]:
    """A line of a table, and what each pipeline stage holds. `named` has the models' names, `cfg` their folders."""
    plan = memory_plan.plan(cfg, gpus, int(card.gb * memory_plan.GB), held)
    if not plan.fits:
        short = "; ".join(memory_plan.shortages(cfg, plan))
        return f"| {card.name} | {short} {'|' * (len(PHASES) + 7)}\n", plan.held
    memory = " | ".join(f"{plan.total(phase) / memory_plan.GB:.0f}" for phase in PHASES)
    shape, teacher = shape_of(named.model.path), shape_of(named.algo.teacher)
    seconds = plan_times.plan_seconds(cfg, shape, teacher, gpus, card, plan, recipe.lengths)
    step = sum(seconds.values())
    once = plan_times.evaluation_seconds(cfg, shape, gpus, card, plan, recipe.lengths, recipe.eval_prompts)
    evaluations = (cfg.train.steps // cfg.train.eval_every + 1) * once
    run = cfg.train.steps * step + evaluations
    times = " | ".join(f"{seconds[phase]:.1f} s" for phase in ("sample", "log-probs", "train", "push"))
    line = f"| {card.name} | {memory} | {times} | {step:.0f} s | {run / 3600:.1f} h | {evaluations / run:.1%} |\n"
    return line, plan.held


def table(stem: str, recipe: Recipe, parent: Path) -> str:
    """The table of one recipe."""
    path = REPO / f"configs/{stem}.yaml"
    named = load_config(str(path), [])
    shapes = plans.shape_overrides(named, parent)
    gpus = plans.world_size(path)
    cfg = load_config(str(path), shapes)
    held = None
    lines = HEAD.format(steps=cfg.train.steps)
    for card in CARDS:
        line, held = card_row(cfg, named, gpus, card, recipe, held)
        lines += line
    return lines


def write_tables(page: str) -> str:
    """The text of the page with its tables as the plans are now."""
    with tempfile.TemporaryDirectory() as parent:
        for stem, recipe in RECIPES.items():
            mark = rf"(<!-- plan of {re.escape(stem)} -->\n).*?(<!-- end -->)"
            found = re.search(mark, page, re.DOTALL)
            if found is None:
                raise ValueError(f"{PAGE} has no place for the plan of {stem}")
            page = page.replace(found[0], f"{found[1]}{table(stem, recipe, Path(parent))}{found[2]}")
    return page


if __name__ == "__main__":
    PAGE.write_text(write_tables(PAGE.read_text()))
