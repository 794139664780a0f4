"""The tables and the picture of docs/dev/measured.md, from the rows that benchmarks/notebook.py adds to its results."""

import numpy as np
import pandas

from benchmarks.works import REPO

PAGE, PICTURE = REPO / "docs/dev/measured.md", REPO / "docs/pictures/measured.svg"
Sections = dict[str, list[str]]  # variants of each section, or of each task

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # seeds: Student's t for a two-sided test at 5 %
MARKS = ("<!-- tables of benchmarks/notebook.py -->", "<!-- end of the tables -->")
HEAD = "| variant | seeds | score | its difference | area | its difference | time |\n|---|---|---|---|---|---|---|"


def difference(rows: pandas.DataFrame, first: pandas.DataFrame, column: str) -> str:
    """How a variant differs from the first one, seed by seed, as a table's cell has it."""
    pairs = rows.merge(first, on="seed", suffixes=("", "_first"))
    if pairs.empty:
        return "–"
    if (pairs.digest == pairs.digest_first).all():
        return "same bits"
    gaps = pairs[column] - pairs[f"{column}_first"]
    if len(gaps) == 1 or not gaps.sem():
        return f"{gaps.mean():+.3f}"
    t = gaps.mean() / gaps.sem()
    text = f"{gaps.mean():+.3f} (t {t:.1f})"
    return f"**{text}**" if abs(t) > T95[min(len(gaps), 5)] else text


def time_of(rows: pandas.DataFrame, first: pandas.DataFrame) -> str:
    """Seconds ÷ the first variant's, where a cell of the same seed ran on the same machine."""
    pairs = rows.merge(first, on=["seed", "machine"], suffixes=("", "_first"))
    return spread(pairs.seconds / pairs.seconds_first, 2) if len(pairs) else "–"


def spread(numbers: pandas.Series, digits: int = 3) -> str:
    """Mean and range over the seeds."""
    mean, low, high = (f"{number:.{digits}f}" for number in (numbers.mean(), numbers.min(), numbers.max()))
    return f"{mean} ({low}–{high})" if len(numbers) > 1 else mean


def found_of(results: pandas.DataFrame, sections: Sections, task: str) -> dict[str, dict[str, pandas.DataFrame]]:
    """{section: {variant: its rows}} of the sections of which more than the first variant was run, and of the first."""
    cells = dict(iter(results[results.task == task].groupby("variant")))
    found = {title: {name: cells[name] for name in names if name in cells} for title, names in sections.items()}
    several = {title: variants for title, variants in found.items() if variants.keys() - {sections[title][0]}}
    opening = next(iter(sections))
    return {opening: found[opening]} | several if found[opening] else several


def tables(results: pandas.DataFrame, sections: Sections, wanted: Sections, seeds: int) -> str:
    """What stands between MARKS: how many cells were run, which were not, and a table for each section."""
    text = ""
    for task, names in wanted.items():
        count = results[results.task == task].variant.value_counts().reindex(names, fill_value=0)
        text += f"### {task}\n\n{count.sum()} of {seeds * len(names)} cells were run.\n\n"
        lacking = count[count < seeds]
        if count.any() and len(lacking):
            text += "".join(
                f"- {n or 'None'} of {seeds} seeds: {', '.join(c.index)}\n" for n, c in lacking.groupby(lacking)
            )
            text += "\n"

        for title, variants in found_of(results, sections, task).items():
            text += f"**{title[0].upper()}{title[1:]}**\n\n{HEAD}\n"
            standard = sections[title][0]
            first = variants.get(standard, results[:0])
            for name, rows in variants.items():
                is_first = name == standard
                line = [name, str(len(rows))]
                for column in ("score", "area"):
                    line += [spread(rows[column]), "" if is_first else difference(rows, first, column)]
                line.append(f"{spread(rows.seconds, 0)} s" if is_first else time_of(rows, first))
                text += f"| {' | '.join(line)} |\n"
            text += "\n"
    return text


def mean_curve(curves: list[np.ndarray]) -> np.ndarray:
    """The mean of the seeds' curves; those with fewer points, as dynamic sampling makes them, are stretched."""
    points = np.linspace(0, 1, max(map(len, curves)))
    return np.mean([np.interp(points, np.linspace(0, 1, len(curve)), curve) for curve in curves], axis=0)


COLOURS = ("#222", "#0b6bcb", "#d1570a", "#0f8a5f", "#b3307f", "#8a6d00", "#5b4fc4", "#c22f2f", "#4a6a7a", "#6aa51a")


def picture(results: pandas.DataFrame, sections: Sections, tasks: list[str]) -> str:
    """An SVG with a panel for each section: the training reward over the run, mean of the seeds."""
    panels = [(task, *section) for task in tasks for section in found_of(results, sections, task).items()]
    width, height, parts = 470, 190, []
    for number, (task, title, variants) in enumerate(panels):
        x, y = 10 + width * (number % 2), 10 + height * (number // 2)
        parts.append(f'<text x="{x}" y="{y + 12}" font-weight="600">{task}: {title}</text>')
        for value in (0, 0.5, 1):
            parts.append(f'<path d="M{x},{y + 160 - 140 * value:g}h280" stroke="#ccc"/>')
            parts.append(f'<text x="{x + 284}" y="{y + 164 - 140 * value:g}">{value:g}</text>')
        for place, (name, rows) in enumerate(variants.items()):
            curve = mean_curve([np.array(curve.split(), float) for curve in rows.curve])
            across = np.linspace(x, x + 280, len(curve))
            points = " ".join(f"{a:.1f},{y + 160 - 140 * b:.1f}" for a, b in zip(across, curve, strict=True))
            colour = COLOURS[place % len(COLOURS)]
            parts.append(f'<polyline points="{points}" stroke="{colour}"/>')
            parts.append(f'<text x="{x + 305}" y="{y + 24 + 12 * place}" fill="{colour}">{name}</text>')
    size = f"0 0 {2 * width + 20} {20 + height * -(-len(panels) // 2)}"
    label = "training reward of each variant over the run, mean of the seeds"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{label}">'
    style = "<style>text { font: 11px system-ui, sans-serif } polyline { fill: none; stroke-width: 1.5 }</style>"
    return "\n".join([head, style, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def write(results: pandas.DataFrame, sections: dict, wanted: Sections, seeds: int):
    """Write the page's part between MARKS, and the picture. `wanted` has the variants of each task."""
    known = {title: [*names] for title, names in sections.items()}
    added = set(results.variant) - {name for names in known.values() for name in names}
    known["added"] = ["grpo", *sorted(added)]
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    text = tables(results, known, wanted, seeds)
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{text}{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    PICTURE.write_text(picture(results, known, [*wanted]))
