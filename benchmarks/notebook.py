"""Train every variant of the trainer alike, and say what differs by more than the seeds do.

    python benchmarks/notebook.py --task demo --seeds 0 1 --jobs 2    # run the cells that docs/bench/notebook.csv lacks
    python benchmarks/notebook.py --task demo --variants gspo_4       # of some variants
    python benchmarks/notebook.py --repeat demo/grpo/0                # run a cell again: are all bits equal?
    python benchmarks/notebook.py --add my_branch algo.loss=mine      # a branch, tag or commit of a fork, with its keys
    python benchmarks/notebook.py --table                             # write docs/dev/measured.md and its picture

A cell is a task, a variant of benchmarks/notebook.yaml and a seed: a run on one rank, from a copy of the sources at a
commit, with the patch of its recipe if it has one. Its row is added to the results when it ends, so an interrupted set
goes on where it was. Copies, data and logs are in build/notebook. docs/dev/measured.md says what is measured.
"""

import argparse
import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pandas
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import notebook_page
from benchmarks.works import REPO, facts
from grpo.parts.base.versions import installed

FOLDER = REPO / "build/notebook"
RESULTS = REPO / "docs/bench/notebook.csv"
SETTINGS = yaml.safe_load((REPO / "benchmarks/notebook.yaml").read_text())
TASKS, SEEDS = SETTINGS["tasks"], range(5)
COLUMNS = [
    "task", "variant", "seed", "overrides", "score", "last_tenth", "area", "seconds", "answers", "tokens", "digest",
    "curve", "commit", "date", "machine", "load", "torch", "vllm", "megatron",
]  # fmt: skip

# ---------------------------------------------------------------- variants


def read_sections() -> dict[str, dict[str, str]]:
    """{section: {variant: overrides}}, with the recipes whose `make demo` line trains the demo's task."""
    sections = {title: dict(variants) for title, variants in SETTINGS["variants"].items()}
    for path in sorted(REPO.glob("recipes/*.patch")):
        run = re.search(r'^make demo(?: ARGS="(.*)")?$', path.read_text().partition("\ndiff ")[0], re.MULTILINE)
        if run and "rollout.turns" not in (run[1] or ""):
            updates = keys_of(run[1] or "").get("train.updates_per_step", "1")
            count = {"1": "one update", "2": "two updates", "4": "four updates"}[updates]
            sections[f"recipes with {count} a step"][f"recipe_{path.stem}"] = run[1] or ""
    return sections


def keys_of(words: str, task: str = "demo") -> dict[str, str]:
    """{key: value} of overrides, as the task takes them."""
    words = [word for word in words.split() if "=" in word]
    if task != "demo":
        words = [SETTINGS["elsewhere"].get(word, word) for word in words]
        words = [word for word in words if word.split("=")[0] not in SETTINGS["demo_only"]]
    return dict(word.split("=", 1) for word in words)


def recipe_of(variant: str) -> str | None:
    if variant.startswith("recipe_"):
        return variant.removeprefix("recipe_")
    return "stale_samples" if variant in SECTIONS["corrections of stale samples"] else None


SECTIONS = read_sections()
VARIANTS = {name: words for section in SECTIONS.values() for name, words in section.items()}


def variants_of(task: str) -> list[str]:
    """All variants but those that differ only in keys that the task does not take."""
    return [name for name, words in VARIANTS.items() if not words or keys_of(words, task)]


# ---------------------------------------------------------------- a cell


def sources_of(commit: str, recipe: str | None) -> Path:
    """A copy of the sources at a commit, with a recipe of that commit; made where it is missing."""
    folder = FOLDER / "sources" / "-".join(filter(None, [commit[:12], recipe]))
    if not folder.exists():
        archive = subprocess.run(["git", "-C", str(REPO), "archive", commit], check=True, capture_output=True).stdout
        new = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(new, filter="data")
        if recipe:
            alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(new.parent)}  # else git takes paths as REPO's
            subprocess.run(["git", "apply", "-C1", f"recipes/{recipe}.patch"], cwd=new, env=alone, check=True)
        new.rename(folder)
    return folder


@cache
def inputs_of(task: str) -> dict[str, str]:
    """Model and data of a task. 100 of the demo's 1,000 rows are held out."""
    made = REPO / "build" / ("tiny" if task == "demo" else task)
    if not (made / "model").exists():
        raise SystemExit(f"{made}/model is missing: make build/tiny/train.jsonl, or make llm")
    if task == "smollm2":
        tool = [sys.executable, "-m", "tools.machine"]
        dtype = subprocess.run(tool, cwd=REPO, check=True, capture_output=True, text=True).stdout.strip()
        data = {"data.train": f"{made}/train.jsonl", "data.eval": f"{made}/eval.jsonl", "model.dtype": dtype}
        return {"model.path": f"{made}/model", **data}

    lines = (made / "train.jsonl").read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    parts = {"data.eval": lines[:100], "data.train": lines[100:]}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for key, rows in parts.items():
        (FOLDER / f"{task}.{key}.jsonl").write_text("".join(rows))
    return {"model.path": f"{made}/model", **{key: f"{FOLDER}/{task}.{key}.jsonl" for key in parts}}


def train(task: str, words: str, seed: int, sources: Path, inputs: dict[str, str], out: Path) -> dict:
    """Train with these overrides, the output beside the folder `out`. Returns numbers. Raises CalledProcessError."""
    keys = keys_of(f"{SETTINGS['common']} {TASKS[task]}") | keys_of(words, task) | inputs
    keys |= {"seed": seed, "output_dir": out}
    launch = ["torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc_per_node=1", "train_grpo.py"]
    command = [sys.executable, "-m", *launch, "--config", TASKS[task].split()[0], *(f"{k}={keys[k]}" for k in keys)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(sources)}

    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(f"{out.name}.log").open("w") as log:
        subprocess.run(command, cwd=sources, env=environment, stdout=log, stderr=log, check=True)
    numbers = read_cell(out)
    shutil.rmtree(out)
    return numbers


def read_cell(out: Path) -> dict:
    """What the output folder of a cell says, of its steps until the budget of answers was used up.

    Groups that were replaced (algo.max_rounds) use it up before the last step. The digest is of all steps.
    """
    lines = read_lines(out / "metrics.jsonl")
    steps = [line for line in lines if line.get("reward/mean") is not None]
    answers = [read_lines(out / f"rollouts/step_{line['step']:06d}.jsonl") for line in steps]
    digest = hashlib.sha256()
    for row in itertools.chain(*answers):
        digest.update(json.dumps([row["reward"], row["response_ids"], row["rollout_logp"]]).encode())

    budget = len(steps) * yaml.safe_load((out / "config.yaml").read_text())["rollout"]["prompts_per_step"]
    used = itertools.accumulate(line["groups/sampled"] for line in steps)
    within = sum(groups <= budget for groups in used)
    steps, answers = steps[:within], answers[:within]
    evaluated = [line.items() for line in lines if line["step"] <= within]
    scores = [value for pairs in evaluated for key, value in pairs if re.fullmatch("eval/.*/avg@1", key)]
    rewards = [line["reward/mean"] for line in steps]
    return {
        "score": f"{scores[-1]:.4f}",
        "last_tenth": f"{np.mean(rewards[-max(1, within // 10) :]):.4f}",
        "area": f"{np.mean(rewards):.4f}",
        "seconds": f"{sum(line['time/step'] for line in steps):.1f}",
        "answers": sum(map(len, answers)),
        "tokens": sum(len(row["response_ids"]) for row in itertools.chain(*answers)),
        "digest": digest.hexdigest()[:32],
        "curve": " ".join(f"{np.mean(part):.3f}" for part in np.array_split(rewards, min(20, within))),
    }


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_cell(task: str, variant: str, seed: int, words: str, commit: str, out: str = "") -> dict:
    """Run a cell and return its row. Raises CalledProcessError."""
    out = FOLDER / (out or f"{task}.{variant.replace('/', '-')}.{seed}")
    row = {"task": task, "variant": variant, "seed": seed, "overrides": words, "commit": commit[:12]}
    row |= train(task, words, seed, sources_of(commit, recipe_of(variant)), inputs_of(task), out)
    packages = {"torch": "torch", "vllm": "vllm", "megatron": "megatron-core"}
    row |= {column: installed(package) for column, package in packages.items()}
    return row | facts() | {"load": f"{os.getloadavg()[1]:.1f}"}  # of the last five minutes


def run_missing(cells: list[tuple], commit: str, jobs: int) -> int:
    """Run the (task, variant, seed, overrides) that the results lack, and add their rows. How many failed."""
    found = read_results()
    there = {*zip(found.task, found.variant, found.seed, strict=True)}
    todo = [cell for cell in cells if cell[:3] not in there]
    for recipe in {recipe_of(variant) for _, variant, *_ in todo}:  # not in the threads
        sources_of(commit, recipe)
    for task in {task for task, *_ in todo}:
        inputs_of(task)

    def run(cell) -> bool:
        try:
            row = run_cell(*cell, commit)
        except subprocess.CalledProcessError as error:
            print(f"{cell[:3]}: exit code {error.returncode}, see the log in build/notebook", flush=True)
            return False
        pandas.DataFrame([row], columns=COLUMNS).to_csv(RESULTS, mode="a", header=not RESULTS.exists(), index=False)
        print(f"{cell[:3]}: score {row['score']}, area {row['area']}, {row['seconds']} s", flush=True)
        return True

    with ThreadPoolExecutor(jobs) as pool:
        return sum(not done for done in pool.map(run, todo))


def read_results() -> pandas.DataFrame:
    if not RESULTS.exists():
        return pandas.DataFrame(columns=COLUMNS)
    return pandas.read_csv(RESULTS, dtype=dict.fromkeys(("overrides", "digest", "commit"), str), keep_default_na=False)


def repeat(name: str) -> bool:
    """Run a cell of the results again, at its commit. Whether all bits are equal."""
    found = read_results()
    found = found[found.task + "/" + found.variant + "/" + found.seed.astype(str) == name]
    if found.empty:
        raise SystemExit(f"{name} is not in {RESULTS}")
    was = found.iloc[-1]
    now = run_cell(was.task, was.variant, int(was.seed), was.overrides, commit_of(was.commit), "repeated")
    for row in (was, now):
        print(name, *(row[column] for column in ("digest", "commit", "machine", "torch", "vllm", "megatron")))
    print("equal bits" if now["digest"] == was.digest else "other bits")
    return now["digest"] == was.digest


def commit_of(name: str) -> str:
    git = ["git", "-C", str(REPO), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    done = subprocess.run(git, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: git knows no such branch, tag or commit")
    return done.stdout.strip()


# ---------------------------------------------------------------- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[*SEEDS])
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, each on a core")
    parser.add_argument("--repeat", metavar="TASK/VARIANT/SEED")
    parser.add_argument("--add", nargs="+", metavar="WORD", help="a branch, tag or commit, then section.key=value ...")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()

    if args.repeat:
        return 0 if repeat(args.repeat) else 1
    if args.table:
        wanted = {task: variants_of(task) for task in TASKS}
        notebook_page.write(read_results(), SECTIONS, wanted, len(SEEDS))
        return 0

    # Seed by seed, so that a set that is interrupted has all variants of the first seeds.
    cells = []
    for task, seed in itertools.product(args.task, args.seeds):
        if args.add:
            cells.append((task, args.add[0], seed, " ".join(args.add[1:])))
        else:
            cells += [(task, name, seed, VARIANTS[name]) for name in variants_of(task) if name in args.variants]
    return 1 if run_missing(cells, commit_of(args.add[0] if args.add else "HEAD"), args.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
