"""Write the end of docs/memory.md, what memory each of configs/ will take, and the table of layouts in docs/tuning.md.

    python -m tools.plans

By arithmetic and from config.json alone, see support/check/memory_plan.py. Models are on the hub, so their shapes are
those of benchmarks/works.py; configs whose model is not among them, the demo's, are left out.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tools"))
from benchmarks import works as bench_works  # noqa: E402
from config import Config  # noqa: E402
from support.base.read_config import load_config  # noqa: E402
from support.check import memory_plan  # noqa: E402

GPU_GB = 80
SHAPES = {  # name on the hub → in benchmarks/works.py
    **{f"Qwen/Qwen2.5-{n}B-Instruct": f"qwen2.5-{n}b" for n in ("0.5", "1.5", "7", "14", "32", "72")},
    **{f"Qwen/Qwen3-{n}": f"qwen3-{n.lower()}" for n in ("30B-A3B", "235B-A22B")},
}

# Model, GPUs, layout of the table in docs/tuning.md.
LAYOUTS = [
    ("0.5B", 1, 1, 1), ("1.5B", 1, 1, 1), ("1.5B", 8, 1, 1), ("7B", 4, 4, 1), ("7B", 8, 2, 1), ("7B", 8, 2, 2),
    ("14B", 8, 4, 1), ("14B", 16, 4, 1), ("32B", 16, 8, 1), ("32B", 32, 8, 2), ("72B", 64, 8, 2),
    ("30B-A3B", 16, 2, 1, 8), ("30B-A3B", 32, 2, 1, 16), ("235B-A22B", 128, 4, 2, 64),
]  # fmt: skip
MARK = "<!-- from here on written by python -m tools.plans -->\n"
HEAD = """| model | weights, 10⁹ | GPUs of 80 GB | layout | state, GB | `rollout.gpu_memory_utilization` at most |
|---|---|---|---|---|---|
"""


def model_folder(name: str, parent: Path) -> Path:
    """A folder with the config.json of a model of the hub, and nothing else."""
    folder = parent / name.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(bench_works.MODELS[SHAPES[name]]))
    return folder


def shape_overrides(cfg: Config, parent: Path) -> list[str]:
    """Overrides that put folders of `model_folder` in place of a configuration's model and teacher."""
    models = {"model.path": cfg.model.path, "algo.teacher": cfg.algo.teacher}
    return [f"{key}={model_folder(name, parent)}" for key, name in models.items() if name in SHAPES]


def world_size(path: Path) -> int:
    """Ranks that the command in a configuration's first lines starts."""
    nodes, local = (re.search(rf"--{name}[=](\d+)", path.read_text()) for name in ("nnodes", "nproc_per_node"))
    return (int(nodes[1]) if nodes else 1) * int(local[1])


def load_planned() -> list[tuple[Path, Config]]:
    """(file, configuration) of all of configs/ whose model has a plan, smallest world first."""
    read = [(path, load_config(str(path), [])) for path in sorted((REPO / "configs").glob("*.yaml"))]
    return sorted(((path, cfg) for path, cfg in read if cfg.model.path in SHAPES), key=lambda pair: world_size(pair[0]))


def section(path: Path, cfg: Config, parent: Path) -> str:
    """What docs/memory.md says of one configuration."""
    here = load_config(str(path), shape_overrides(cfg, parent))
    ranks = world_size(path)
    text = memory_plan.describe(here, ranks, memory_plan.plan(here, ranks, GPU_GB * memory_plan.GB))
    return f"\n## {path.stem}: {cfg.model.path}, {world_size(path)} × {GPU_GB} GB\n\n```\n{text}\n```\n"


def layout_row(parent: Path, size: str, gpus: int, tp: int, pp: int, ep: int = 1) -> str:
    """A line of the table in docs/tuning.md: every rank alike, bf16, no reference."""
    name = next(name for name in SHAPES if f"-{size}" in name)
    keys = {"model.path": model_folder(name, parent), "parallel.tp": tp, "parallel.pp": pp, "parallel.ep": ep}
    cfg = load_config(str(REPO / "configs/qwen7b.yaml"), [*(f"{k}={v}" for k, v in keys.items()), "algo.kl_coef=0"])
    plan = memory_plan.plan(cfg, gpus, GPU_GB * memory_plan.GB)
    shape = bench_works.MODELS[SHAPES[name]]
    experts = 3 * shape["hidden_size"] * shape.get("moe_intermediate_size", 0) * shape.get("num_experts", 0)
    experts = f", {experts * shape['num_hidden_layers'] / 1e9:.2f} of it experts" if experts else ""
    layout = f"tp {tp} × pp {pp}"
    if experts:
        layout += f", ep {ep} × etp 1"
    state = max(sum(held.gpu.values()) for held in plan.held.values()) / memory_plan.GB
    model = name.partition("/")[2].removesuffix("-Instruct")
    weights = bench_works.count(shape) / 1e9
    return f"| {model}{experts} | {weights:.2f} | {gpus} | {layout} | {state:.1f} | {plan.utilization:.2f} |\n"


def main() -> None:
    page, tuning = REPO / "docs/memory.md", REPO / "docs/tuning.md"
    with tempfile.TemporaryDirectory() as parent:
        sections = [section(path, cfg, Path(parent)) for path, cfg in load_planned()]
        rows = [layout_row(Path(parent), *layout) for layout in LAYOUTS]
    page.write_text(page.read_text().partition(MARK)[0] + MARK + "".join(sections))
    before, _, rest = tuning.read_text().partition(HEAD)
    tuning.write_text(before + HEAD + "".join(rows) + rest[rest.index("\n\n") + 1 :])


if __name__ == "__main__":
    main()
