"""Models of the hub that configs/ name, by their config.json alone: plans and dry runs need no more of them."""

import json
import re
from pathlib import Path

from benchmarks import works

SHAPES = {  # name on the hub → in benchmarks/works.py
    **{f"Qwen/Qwen2.5-{n}B-Instruct": f"qwen2.5-{n}b" for n in ("0.5", "1.5", "7", "14", "32", "72")},
    **{f"Qwen/Qwen3-{n}": f"qwen3-{n.lower()}" for n in ("30B-A3B", "235B-A22B")},
}


def model_folder(name: str, parent: Path) -> Path:
    """A folder with the config.json of a model of the hub, and nothing else."""
    folder = parent / name.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(works.MODELS[SHAPES[name]]))
    return folder


def world_size(path: Path) -> int:
    """Ranks that the command in a configuration's first lines starts."""
    nodes, local = (re.search(rf"--{name}[=](\d+)", path.read_text()) for name in ("nnodes", "nproc_per_node"))
    return (int(nodes[1]) if nodes else 1) * int(local[1])
