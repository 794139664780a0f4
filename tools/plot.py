"""Draw learning curves from metrics.jsonl files.

    python tools/plot.py outputs/tiny/metrics.jsonl [more.jsonl ...] --out curves.png

One curve per file and panel: reward, entropy, response length and the gap between trainer and vLLM over the steps.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "reward/mean": "mean reward",
    "entropy": "entropy (nats per token)",
    "tokens/response_mean": "response length (tokens)",
    "logp_gap/max": "largest |trainer − vLLM| log-prob",
}


def draw(files: list[Path], out: Path) -> None:
    """Plot the metrics.jsonl `files` into the picture `out`."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3), constrained_layout=True)
    for path in files:
        rows = [json.loads(line) for line in path.open()]
        rows = [row for row in rows if "reward/mean" in row]  # without lines of an evaluation only
        for axis, key in zip(axes, PANELS, strict=True):
            axis.plot([row["step"] for row in rows], [row[key] for row in rows], linewidth=1.2, label=str(path.parent))
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if key == "logp_gap/max":
            axis.set_yscale("log")
    axes[0].set_ylim(0, 1.02 * max(1.0, axes[0].get_ylim()[1]))
    if len(files) > 1:
        axes[0].legend(fontsize=7)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("curve.png"))
    args = parser.parse_args()
    draw(args.metrics, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
