"""Draw what a configuration means, as SVG files; `train_grpo.py --dry-run --draw FILE.svg` puts them in one.

    python -m tools.draw --config configs/qwen7b.yaml --world-size 8 --out docs/pictures
    python -m tools.draw --config configs/tiny.yaml --run outputs/tiny --step 1 --out docs/pictures

Writes layout.svg, push.svg and, with several stages, pipeline.svg; with --run also row.svg: a few samples of that step,
packed by the program's own functions, with masks and numbers as the loss gets them.
"""

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import megatron_bridge as bridge
import train_grpo
from config import Config, UserError
from support.base.read_config import load_config
from support.check import checks
from support.data.prompts import load_tokenizer
from support.step.packing import MicroBatch, pack
from tools import drawing
from tools.drawing import WIDTH, box, svg, text

CELLS = 27  # positions of a row that fit into the picture


def some_row(cfg: Config, rollouts: Path) -> MicroBatch:
    """A row of some samples of a step, of different lengths where there are such, as an update has it."""
    lines = [json.loads(line) for line in rollouts.open()]
    known = {field.name for field in fields(train_grpo.Sample)}  # a run may have recorded more of each token
    lines = [{name: line[name] for name in line.keys() & known} for line in lines if line["advantage"]]
    samples = [train_grpo.Sample(**line) for line in lines]
    chosen, room = [], CELLS
    by_length = {len(s.prompt_ids) + len(s.response_ids): s for s in samples}
    for sample in [*by_length.values(), *samples]:
        length = len(sample.prompt_ids) + len(sample.response_ids) - 1
        if length <= room and all(sample is not other for other in chosen):
            chosen.append(sample)
            room -= length
    if not chosen:
        raise UserError(f"{rollouts}: no sample with an advantage is as short as {CELLS} tokens")
    batch = train_grpo.flatten(chosen, cfg.algo.mask_truncated)
    advantages_N, everyone = torch.tensor([s.advantage for s in chosen]).float(), [*range(len(chosen))]
    length = cfg.algo.loss_norm_length or cfg.rollout.max_new_tokens
    weights_F = train_grpo.loss_weights(batch.trained, batch.seq_id, everyone, cfg.algo.loss_norm, length)
    batch = replace(batch, advantages=advantages_N[batch.seq_id], weights=weights_F)
    multiple = bridge.token_multiple(cfg.parallel)
    order = sorted(everyone, key=lambda n: -batch.lengths_N[n])  # as plan_bins has them
    return pack(batch, order, -(-int(batch.lengths_N.sum()) // multiple) * multiple, "cpu")


def draw_row(mb: MicroBatch, tokenizer) -> str:
    """A packed row: a column a position, with what is known there of the next token."""
    count = mb.tokens.shape[1]
    left, height = 112, 24
    width = (WIDTH - left - 12) / count
    names = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    numbers = mb.seq_id[0].tolist()
    rows = {
        "tokens": [names[i] for i in mb.tokens[0]],
        "targets": [names[i] for i in mb.targets[0]],
        "mask": [f"{v:.0f}" for v in mb.mask[0]],
        "position_ids": mb.position_ids[0].tolist(),
        "seq_id": numbers,
        "advantages": [f"{v:.1f}" for v in mb.advantages[0]],
        "weights": [f"{v:.2g}" for v in mb.weights[0]],
        "rollout_logp": [f"{v:.1f}" for v in mb.rollout_logp[0]],
    }
    title = f"A packed row: {len(set(numbers) - {-1})} samples, {count} positions, no padding between them"
    parts = [text(12, 24, title, "title")]
    parts.append(text(12, 44, "coloured where the mask is 1: there the target belongs to the answer", "soft"))
    for r, (name, values) in enumerate(rows.items()):
        y = 60 + r * height
        parts.append(text(12, y + 16, name, "mono"))
        for t, value in enumerate(values):
            kind = "box"
            if numbers[t] < 0:
                kind = "idle"
            elif mb.mask[0, t]:
                kind = f"c{numbers[t] % 8}"
            parts.append(box(left + t * width, y, width - 1, height - 1, kind))
            parts.append(
                text(left + (t + 0.5) * width, y + 16, value, "mono" if len(str(value)) < 4 else "small", "middle")
            )
    bottom = 60 + len(rows) * height
    ends = mb.cu_seqlens.tolist()
    parts.append(text(12, bottom + 22, "cu_seqlens", "mono"))
    for end in ends:
        x = left + end * width
        parts.append(f'<path d="M{x:.1f} 56V{bottom + 8}" class="line" stroke-width="2"/>')
        parts.append(text(min(x, WIDTH - 16), bottom + 22, end, "mono", "middle"))
    parts.append(text(12, bottom + 46, "attention reads cu_seqlens, so no token sees another sample", "soft"))
    return svg(parts, bottom + 58, title)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.draw", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the pictures")
    parser.add_argument("--run", type=Path, help="output_dir of a run, for row.svg")
    parser.add_argument("--step", type=int, default=1, help="whose samples row.svg shows")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()
    try:
        cfg = load_config(args.config, args.overrides)
        checks.check_config(cfg, args.world_size)
        found = drawing.pictures(cfg, args.world_size)
        if args.run:
            row = some_row(cfg, args.run / f"rollouts/step_{args.step:06d}.jsonl")
            found["row"] = draw_row(row, load_tokenizer(cfg.model.path))
    except (UserError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    for name, picture in found.items():
        (args.out / f"{name}.svg").write_text(picture)
        print(args.out / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
