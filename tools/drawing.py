"""Pictures of a configuration, as SVG: which rank holds what, how a pipeline's stages work and wait, what a push moves.

Each picture is drawn from what the program itself uses: Megatron's order of ranks, its schedule, the weights that it
builds on each stage, the bridge's buckets. `--dry-run --draw FILE.svg` writes them in one file, tools/draw.py one by
one.
"""

import html
import math
import textwrap
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from megatron.core.parallel_state import RankGenerator
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

import megatron_bridge as bridge
from config import Config, ParallelConfig, UserError
from support.check.memory_count import build_on_meta, fake_process_groups
from support.check.run_plan import rows_of_an_update
from support.step.packing import bubble

WIDTH = 1000  # of every picture, in pixels
MOST_REPLICAS = 4  # that are drawn
MOST_PASSES = 160  # forward passes of chunks in a timeline that is drawn
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c2127; }
.soft { fill: #59636e; } .title { font-size: 15px; font-weight: 600; } .small { font-size: 10px; }
.mono { font-family: ui-monospace, monospace; font-size: 11px; }
.paper { fill: #ffffff; } .box { fill: #f6f7f9; stroke: #8a94a0; }
.line { stroke: #8a94a0; fill: none; } .idle { fill: #e3e6ea; }
.c0 { fill: #9ecbf2; } .c1 { fill: #f9c396; } .c2 { fill: #9fdcc3; } .c3 { fill: #e6b5da; } .c4 { fill: #ead98a; }
.c5 { fill: #bcc5f7; } .c6 { fill: #cfd4da; } .c7 { fill: #f5b0aa; }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ed; } .soft { fill: #a3adb8; } .paper { fill: #12161b; } .box { fill: #1a2027; stroke: #6b7580; }
.line { stroke: #6b7580; } .idle { fill: #2a3139; } .c0 { fill: #1d5a8f; } .c1 { fill: #8a4a14; } .c2 { fill: #14664d; }
.c3 { fill: #7a2f69; } .c4 { fill: #6b5a0c; } .c5 { fill: #3f4aa0; } .c6 { fill: #4a535d; } .c7 { fill: #8c2f28; } }
"""


# ---------------------------------------------------------------- SVG


def text(x: float, y: float, words, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{html.escape(str(words))}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box", tip: str = "") -> str:
    """A rectangle; `tip` shows where a pointer rests on it."""
    inside = f"<title>{html.escape(tip)}</title>" if tip else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}">{inside}</rect>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" class="line" marker-end="url(#head)"/>'


def svg(parts: list[str], height: float, label: str, width: float = WIDTH) -> str:
    """The picture as a file of its own; `label` is what it is called where it cannot be seen."""
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head = f'<defs>{head}<path d="M0 0L8 4L0 8z" class="line"/></marker></defs>'
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(label)}">'
    body = "\n".join([f"<style>{STYLE}</style>", head, box(0, 0, width, height, "paper"), *parts])
    return f"{opening}\n{body}\n</svg>\n"


def stack_pictures(pictures: list[str]) -> str:
    """Several pictures below each other, as one."""
    heights = [float(picture.split('height="')[1].split('"')[0]) for picture in pictures]
    tops = np.cumsum([0, *heights])
    placed = [p.replace("<svg ", f'<svg y="{top:.0f}" ', 1) for p, top in zip(pictures, tops[:-1], strict=True)]
    return svg(placed, tops[-1], "layout, pipeline and weight push of a configuration")


def size_of(number: float) -> str:
    """Bytes in decimal units: 1.5e9 → "1.5 GB"."""
    unit = min(max(int(math.log10(max(number, 1)) // 3), 0), 3)
    return f"{number / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}"


def run_of(numbers: list[int]) -> str:
    """Numbers in words: [0, 1, 2, 5] → "0–2, 5"."""
    ends = [i for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    parts = np.split(numbers, [end + 1 for end in ends])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts if len(p))


# ---------------------------------------------------------------- who holds what


def rank_coordinates(parallel: ParallelConfig, world_size: int, rollout_tp: int) -> list[dict[str, int]]:
    """Of each rank its coordinate in every dimension, as Megatron orders ranks.

    tp, cp, dp, pp; etp, ep, edp of the experts; engine, of vLLM, and rollout_tp in it.
    """
    p = parallel
    dense = {"tp": p.tp, "cp": p.cp, "dp": world_size // (p.tp * p.cp * p.pp), "pp": p.pp}
    sparse = {"tp": p.etp, "ep": p.ep, "dp": world_size // (p.etp * p.ep * p.pp), "pp": p.pp}
    found = [{"engine": rank // rollout_tp, "rollout_tp": rank % rollout_tp} for rank in range(world_size)]
    names = {"tp": "etp", "ep": "ep", "dp": "edp"}
    for sizes, named in ((dense, {name: name for name in dense}), (sparse, names)):
        # The order is the default of Megatron's initialize_model_parallel, which bridge.init_model_parallel leaves.
        generator = RankGenerator(**{"ep": 1, "cp": 1, **sizes}, order="tp-cp-ep-dp-pp")
        for name, called in named.items():
            for group in generator.get_ranks(name):
                for place, rank in enumerate(group):
                    found[rank][called] = place
    return found


def layers_of(shapes: dict[str, torch.Size]) -> list[int]:
    """Numbers of the layers that a pipeline stage holds, in all its chunks, from the names of its weights."""
    return sorted({int(name.split(".")[2]) for name in shapes if name.startswith("decoder.layers.")})


# ---------------------------------------------------------------- the pictures


def write_pictures(cfg: Config, world_size: int, path: Path) -> None:
    """Write the pictures of the configuration into one file. Raises UserError."""
    try:
        path.write_text(stack_pictures([*pictures(cfg, world_size).values()]))
    except OSError as error:
        raise UserError(f"--draw {path}: {error.strerror}") from None
    print(f"drawn:   {path}")


def stage_shapes(cfg: Config, world_size: int) -> list[dict[str, torch.Size]]:
    """Of each pipeline stage {Megatron's name of a weight: its shape on the stage's first rank}."""
    p = cfg.parallel
    stages = []
    for stage in range(p.pp):
        with fake_process_groups(p, world_size, stage * world_size // p.pp, cfg.seed):
            own = bridge.named_weights(build_on_meta(cfg.model.path, cfg, cfg.lora))
            stages.append({name: weight.shape for name, weight in own.items()})
    return stages


def pictures(cfg: Config, world_size: int) -> dict[str, str]:
    """{name: SVG} of what a configuration alone says."""
    hf = transformers.AutoConfig.from_pretrained(cfg.model.path)
    stages = stage_shapes(cfg, world_size)
    found = {"layout": draw_layout(cfg, world_size, hf, stages)}
    if cfg.parallel.pp > 1:
        p = cfg.parallel
        found["pipeline"] = draw_pipeline(p, *rows_of_an_update(cfg, world_size // (p.tp * p.pp * p.cp)))
    return found | {"push": draw_push(cfg, world_size, hf, stages)}


def stage_heads(cfg: Config, stages: list[dict], stage: int, room: float) -> list[str]:
    """What a pipeline stage holds, in three lines for a column of `room` pixels."""
    ends = ""
    if stage == 0:
        ends += ", embedding"
    if stage == len(stages) - 1:
        ends += ", norm, head"
    layers = layers_of(stages[stage])
    noun = "layer" if len(layers) == 1 else "layers"
    numbers = textwrap.shorten(f"{noun} {run_of(layers)}", int(room / 5.5), placeholder=" …")
    itemsize = bridge.DTYPES[cfg.model.dtype].itemsize
    size = sum(shape.numel() for shape in stages[stage].values()) * itemsize
    return [f"stage {stage}{ends}", numbers, f"{size_of(size)} of weights a rank"]


def rank_lines(p: ParallelConfig, hf, rank: int, place: dict[str, int]) -> list[str]:
    """What the box of a rank says: its number, its shard of the model, its experts."""
    lines = [f"rank {rank}"]
    if p.tp * p.cp > 1:
        shard = f"tp {place['tp']}"
        if p.cp > 1:
            shard += f" cp {place['cp']}"
        lines.append(shard)
    if bridge.is_moe(hf) and p.ep * p.etp > 1:
        each = bridge.num_experts(hf) // p.ep
        experts = f"experts {run_of([*range(place['ep'] * each, (place['ep'] + 1) * each)])}"
        if p.etp > 1:
            experts += f" etp {place['etp']}"
        lines.append(experts)
    return lines


def draw_layout(cfg: Config, world_size: int, hf, stages: list[dict]) -> str:
    """Ranks as boxes: a row a replica, a block a pipeline stage; the strip below each rank is its vLLM engine."""
    p = cfg.parallel
    of = rank_coordinates(p, world_size, cfg.rollout.tp)
    replicas = world_size // (p.tp * p.cp * p.pp)
    shown, inner = min(replicas, MOST_REPLICAS), p.tp * p.cp
    gap, height = 14, 74
    left, top = 92, 92
    room = (WIDTH - left - 12 - gap * (p.pp - 1)) / p.pp
    width = room / inner
    sizes = f"tp {p.tp} × cp {p.cp} × pp {p.pp} × dp {replicas}"
    parts = [text(12, 24, f"{world_size} ranks = {sizes}; {world_size // cfg.rollout.tp} vLLM engines", "title")]
    for stage in range(p.pp):
        x = left + stage * (room + gap)
        title, numbers, size = stage_heads(cfg, stages, stage, room)
        parts += [text(x, 46, title), text(x, 62, numbers, "small"), text(x, 78, size, "soft small")]
    for rank, place in enumerate(of):
        if place["dp"] >= shown:
            continue
        x = left + place["pp"] * (room + gap) + (place["cp"] * p.tp + place["tp"]) * width
        y = top + place["dp"] * (height + gap)
        lines = rank_lines(p, hf, rank, place)
        engine = f"engine {place['engine']}" if width > 60 else str(place["engine"])
        tip = ", ".join(f"{name} {value}" for name, value in place.items())
        parts += [box(x, y, width - 3, height, "box", f"rank {rank}: {tip}")]
        parts += [box(x, y + height - 17, width - 3, 17, f"c{place['engine'] % 8}")]
        parts.append(text(x + 5, y + 15, lines[0]))
        parts += [text(x + 5, y + 15 + 14 * i, line, "soft small") for i, line in enumerate(lines[1:], 1)]
        parts += [text(x + 5, y + height - 5, engine, "small")]
    parts += [text(12, top + 18 + r * (height + gap), f"replica {r}") for r in range(shown)]
    bottom = top + shown * (height + gap) + 8
    notes = []
    if replicas > shown:
        notes.append(f"{replicas - shown} more replicas are laid out alike")
    notes += [f"a box: a rank of the trainer; the strip in it: its vLLM engine, of tp {cfg.rollout.tp}"]
    parts += [text(12, bottom + 16 * i, note, "soft") for i, note in enumerate(notes)]
    return svg(parts, bottom + 16 * len(notes), f"{world_size} ranks, {sizes}")


def schedule(p: int, v: int, m: int, stage: int) -> list[tuple[str, int, int]]:
    """What a pipeline stage does, in order: ("F" or "B", micro-batch, chunk), as Megatron's schedules have it.

    Source: forward_backward_pipelining_without_interleaving and _with_interleaving of Megatron-core 0.16.
    """
    group = SimpleNamespace(size=lambda: p, rank=lambda: stage)
    ask = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=v if v > 1 else None)
    total, _, warmup, _ = get_pp_rank_microbatches(m, v, p, p2p_communicator=ask)
    table = get_schedule_table(m, v, p)
    forward = [("F", mb, chunk) for mb, chunk in table]
    backward = [("B", mb, v - 1 - chunk) for mb, chunk in table]
    steady = [work for pair in zip(forward[warmup:], backward, strict=False) for work in pair]
    return forward[:warmup] + steady + backward[total - warmup :]


def timeline(p: int, v: int, m: int) -> list[list[tuple[float, float, str, int, int]]]:
    """Of each stage what it does and when: (begin, end, "F" or "B", micro-batch, chunk).

    A forward pass of a chunk takes 1 / v, a backward pass 2 / v; sending takes nothing.
    """
    waiting = [schedule(p, v, m, stage) for stage in range(p)]
    done: dict[tuple, float] = {}  # (kind, micro-batch, stage among all chunks) → when it ended
    found = [[] for _ in range(p)]
    while any(waiting):
        moved = False
        for stage in range(p):
            while waiting[stage]:
                kind, mb, chunk = waiting[stage][0]
                place = chunk * p + stage
                first, last = kind == "F" and place == 0, kind == "B" and place == p * v - 1
                before = ("F", mb, place) if last else (kind, mb, place + (-1 if kind == "F" else 1))
                if not first and before not in done:
                    break
                begin = max(found[stage][-1][1] if found[stage] else 0.0, 0.0 if first else done[before])
                end = done[kind, mb, place] = begin + (1 if kind == "F" else 2) / v
                found[stage].append((begin, end, *waiting[stage].pop(0)))
                moved = True
        if not moved:
            raise ValueError(f"the schedule of {p} stages, {v} chunks, {m} micro-batches waits for itself")
    return found


def draw_pipeline(parallel: ParallelConfig, fewest: int, most: int) -> str:
    """An update of as few micro-batches as short answers make, and of as many as long ones make."""
    pictures = [draw_timeline(parallel, fewest, "as few as short answers make")]
    if fewest < most:
        pictures.append(draw_timeline(parallel, most, "as many as long answers make"))
    return stack_pictures(pictures) if len(pictures) > 1 else pictures[0]


def draw_timeline(parallel: ParallelConfig, m: int, why: str) -> str:
    """A row a stage, time to the right: forward and backward passes of `m` micro-batches, and where a stage waits."""
    p, v = parallel.pp, parallel.vpp
    chunks = f", {v} chunks a stage" if v > 1 else ""
    title = f"An update of {m} micro-batches, {why}: {p} stages{chunks} idle {bubble(m, parallel):.0%} of it"
    if p * v * m > MOST_PASSES:
        return svg([text(12, 24, title, "title")], 40, title)
    work = timeline(p, v, m)
    end = max(stop for row in work for _, stop, *_ in row)
    left, top = 70, 66
    height = 26
    scale = (WIDTH - left - 12) / end
    parts = [text(12, 24, title, "title")]
    parts += [box(12, 36, 14, 12, "c0"), text(31, 46, "forward"), box(95, 36, 14, 12, "c1"), text(114, 46, "backward")]
    parts += [box(190, 36, 14, 12, "idle"), text(209, 46, "idle: the bubble")]
    if v > 1:
        parts.append(text(330, 46, "violet and yellow: chunks of a stage after its first", "soft"))
    for stage, row in enumerate(work):
        y = top + stage * (height + 4)
        parts += [text(12, y + 17, f"stage {stage}"), box(left, y, end * scale, height, "idle")]
        for begin, stop, kind, mb, chunk in row:
            wide = (stop - begin) * scale
            color = {("F", True): "c0", ("F", False): "c5", ("B", True): "c1", ("B", False): "c4"}[kind, chunk == 0]
            direction = "forward" if kind == "F" else "backward"
            tip = f"{direction} of micro-batch {mb}"
            if v > 1:
                tip += f", chunk {chunk}"
            parts.append(box(left + begin * scale, y, max(wide - 1, 0.5), height, color, tip))
            if wide > 15:
                parts.append(text(left + begin * scale + wide / 2, y + 17, mb, "small", "middle"))
    bottom = top + p * (height + 4) + 16
    parts.append(text(left, bottom, "time →  a backward pass is drawn twice as long as a forward pass", "soft"))
    return svg(parts, bottom + 14, title)


def push_steps(p: ParallelConfig, rollout_tp: int, experts: bool) -> list[tuple[str, list[str]]]:
    """(step, two lines on it) of the way of a bucket from the trainer to vLLM."""
    held = [f"a rank has 1/{p.tp} of a tensor", f"experts: ep {p.ep} × etp {p.etp}" if experts else ""]
    if p.tp * p.ep * p.etp == 1:
        gathered = ["nothing: a rank has", "whole tensors"]
    else:
        gathered = ["over the ranks that share", "the tensors of the bucket"]
    if p.pp == 1:
        sent = ["nothing: there is", "one stage"]
    else:
        sent = [f"from its stage to the other {p.pp - 1}", "of the same replica"]
    return [
        ("held by the trainer", held),
        ("all-gather", gathered),
        ("broadcast", sent),
        ("joined and renamed", ["one full tensor at a time,", "under its Hugging Face name"]),
        ("loaded by vLLM", [f"an engine's rank keeps 1/{rollout_tp};", "digests prove it, bit for bit"]),
    ]


def draw_push(cfg: Config, world_size: int, hf, stages: list[dict]) -> str:
    """The weights in the order in which they cross from trainer to vLLM, cut into buckets; and the way of a bucket."""
    p, itemsize = cfg.parallel, bridge.DTYPES[cfg.model.dtype].itemsize
    limit = cfg.rollout.sync_bucket_mb << 20
    with fake_process_groups(p, world_size, rank=0):
        cut = [
            (stage, names, sum(stages[stage][n].numel() * bridge.shard_group(n)[0].size() for n in names) * itemsize)
            for stage, names in bridge.buckets(stages, hf, limit // itemsize)
        ]
    total = sum(size for *_, size in cut)
    noun = "bucket" if len(cut) == 1 else "buckets"
    buckets = f"{len(cut)} {noun} of up to {cfg.rollout.sync_bucket_mb} MiB, or one tensor"
    title = f"A push: {size_of(total)} in {buckets}"
    parts = [text(12, 24, title, "title")]
    parts.append(text(12, 48, "weights in layer order; a box is a bucket, its colour the stage that holds it", "soft"))
    x, scale = 12.0, (WIDTH - 24) / total
    for number, (stage, names, size) in enumerate(cut):
        tip = f"bucket {number}, {size_of(size)}, of stage {stage}: {names[0]} … {names[-1]}"
        parts.append(box(x, 58, max(size * scale - 1, 0.5), 30, f"c{stage % 8}", tip))
        if size * scale > 40:
            parts.append(text(x + size * scale / 2, 78, size_of(size), "small", "middle"))
        x += size * scale
    width = (WIDTH - 24 - 4 * 24) / 5
    for number, (head, lines) in enumerate(push_steps(p, cfg.rollout.tp, bridge.is_moe(hf))):
        x = 12 + number * (width + 24)
        parts += [box(x, 112, width, 66), text(x + 8, 131, head)]
        parts += [text(x + 8, 149 + 15 * i, line, "soft small") for i, line in enumerate(lines)]
        if number:
            parts.append(arrow(x - 22, 145, x - 2, 145))
    largest = max(size for *_, size in cut)
    note = f"every rank gets every tensor: beside its own it holds a bucket, at most {size_of(largest)}, and one tensor"
    parts.append(text(12, 202, note, "soft"))
    return svg(parts, 216, title)
