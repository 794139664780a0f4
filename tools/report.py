"""Write one HTML file that shows runs: hints, curves, and every prompt with its answers, token by token.

    python -m tools.report outputs/a outputs/b --out report.html    open it in a browser; needs no server, no network

Reads the files that every run writes, also while it writes them. docs/watching.md describes the page.
"""

import argparse
import base64
import gzip
import hashlib
import html
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pandas
import yaml
from transformers import AutoTokenizer

from config import Config, UserError
from grpo.parts.base.read_config import SECTIONS, dotted_items, validate
from grpo.run.advice import Advice
from oracle.run import read_rows

TEMPLATE = Path(__file__).with_suffix(".html")
BYTES_A_TOKEN = 4.5  # of the page for each response token, about: id and log-prob, compressed, as base64
# Curves that are shown at once, with the curves of evaluations. docs/metrics.md describes all.
FIRST = (
    "reward/mean", "reward/std", "entropy", "grad_norm", "loss/policy", "kl/ref", "tokens/response_mean",
    "tokens/truncated_frac", "groups/zero_std_frac", "ratio/clip_frac", "logp_gap/mean", "logp_gap/max", "lr",
    "time/step", "speed/response_tokens_per_s", "pipeline/bubble",
)  # fmt: skip
WIDTH, HEIGHT = 300, 110  # of a curve, in pixels
OF_ANSWER = ("reward", "reward_parts", "finished", "graded", "error", "text", "turns")  # what the page shows of it


class Run:
    """The output folder of a run. Raises UserError if it has no metrics.jsonl."""

    def __init__(self, folder: Path, tokenizer: str | None = None):
        if not (folder / "metrics.jsonl").exists():
            raise UserError(f"{folder}: no metrics.jsonl there; name the output_dir of a run")
        self.folder = folder
        self.config = yaml.safe_load((folder / "config.yaml").read_text()) or {}
        self.rows = read_rows(folder / "metrics.jsonl")
        self.steps = [row for row in self.rows if "reward/mean" in row]
        self.tokenizer = self.find_tokenizer(tokenizer)
        self.texts: dict[int, str] = {}  # token id → text

    def find_tokenizer(self, given: str | None):
        """The `given` tokenizer, else the one of the run's export, else the one of model.path on this disk, or None."""
        exports = sorted(self.folder.glob("hf/step_*/tokenizer_config.json"))
        own = exports[-1].parent if exports else self.config.get("model", {}).get("path", "")
        try:
            return AutoTokenizer.from_pretrained(given or own, local_files_only=given is None)
        except Exception as error:  # transformers raises any exception for a damaged file
            if given:
                raise UserError(f"--tokenizer {given}: {type(error).__name__}: {error}") from None
            return None

    def sample_files(self) -> dict[str, Path]:
        """{"step_000001": file, …}, steps before evaluations."""
        folder = self.folder / "rollouts"
        files = sorted(folder.glob("step_*.jsonl")) + sorted(folder.glob("eval_*.jsonl"))
        return {file.stem: file for file in files}

    def find_hints(self) -> dict[str, str]:
        """{hint: since which step}, in the words of the run; empty for the configuration of another version."""
        found = {}
        try:
            advice = Advice(validate(self.config, str(self.folder / "config.yaml")))
            for step in self.steps:
                for rule, text in advice.add(step).items():
                    found.setdefault(rule, (text, step["step"]))
        except (UserError, KeyError):
            return {}
        return {text: f"since step {step}" for text, step in found.values()}

    def block(self, name, share: float = 1.0) -> bytes:
        """The samples of a file as gzipped JSON: all groups, or a share of them, evenly spaced."""
        groups = defaultdict(list)
        for sample in read_rows(self.sample_files()[name]):
            groups[sample["group"]].append(sample)

        numbers = sorted(groups)
        if share < 1:
            wanted = max(1, round(share * len(numbers)))
            numbers = [numbers[i * len(numbers) // wanted] for i in range(wanted)]
        shown = [read_group(number, groups[number]) for number in numbers]

        ids = set()
        for group in shown:
            ids.update(group["prompt"])
            for answer in group["answers"]:
                ids.update(answer["ids"])
        texts = {i: self.token_text(i) for i in sorted(ids)} if self.tokenizer else {}

        content = json.dumps({"groups": shown, "of": len(groups), "texts": texts}, ensure_ascii=False)
        return gzip.compress(content.encode(), 6, mtime=0)

    def token_text(self, token_id) -> str:
        """The text of one token. Bytes that are no character by themselves become U+FFFD."""
        if token_id not in self.texts:
            name = self.tokenizer.convert_ids_to_tokens(token_id) or f"<{token_id}>"
            text = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False) or name
            marked = name.startswith("▁") and not text.startswith(" ")  # SentencePiece drops a text's first space
            self.texts[token_id] = " " + text if marked else text
        return self.texts[token_id]


def read_group(number: int, samples: list[dict]) -> dict:
    """A prompt and its answers for the page, with the values of tokens that the run recorded."""
    answers = []
    for s in samples:
        answer = {name: s.get(name) for name in OF_ANSWER}
        answer["ids"] = s["response_ids"]

        values = {
            "logp": s["rollout_logp"],
            "advantage": s.get("advantages", [s["advantage"]] * len(s["response_ids"])),
        }
        for name, numbers in values.items():
            answer[name] = [float(f"{x:.4g}") for x in numbers]
        answers.append(answer)
    return {"group": number, "source": samples[0]["source"], "prompt": samples[0]["prompt_ids"], "answers": answers}


# ---------------------------------------------------------------- the page


def curve(name, runs: list[Run]) -> str:
    """A small picture of a metric over the steps, a line for each run. Empty if no run has a number of it."""
    lines = [[(row["step"], row[name]) for row in run.rows if row.get(name) is not None] for run in runs]
    steps = [step for line in lines for step, _ in line]
    values = [value for line in lines for _, value in line]
    if not steps:
        return ""

    low, high = min(values), max(values)
    first, last = min(steps), max(steps)
    paths = []
    for number, line in enumerate(lines):
        colour = f"r{number % 6}"
        x = [WIDTH * (step - first) / ((last - first) or 1) for step, _ in line]
        y = [HEIGHT - 4 - (HEIGHT - 8) * (value - low) / ((high - low) or 1) for _, value in line]
        if len(line) > 40:  # a pale line under its running mean
            paths.append(f'<polyline class="{colour} raw" points="{points(x, y)}"/>')
            y = pandas.Series(y).ewm(alpha=0.1).mean()
        paths.append(f'<polyline class="{colour}" points="{points(x, y)}"/>')
        if len(line) == 1:
            paths.append(f'<circle class="{colour}" cx="{x[0]:.1f}" cy="{y[0]:.1f}" r="3"/>')

    latest = ", ".join(f"{line[-1][1]:.4g}" for line in lines if line)
    caption = f"<figcaption><b>{html.escape(name)}</b> {low:.4g} to {high:.4g}; last {latest}</figcaption>"
    return f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(paths)}</svg></figure>\n'


def points(x, y) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def describe(runs: list[Run]) -> str:
    """A section for each run: progress, hints; then the keys in which the runs, or run and defaults, differ."""
    parts = []
    for number, run in enumerate(runs):
        done = run.steps[-1]["step"] if run.steps else 0
        planned = run.config.get("train", {}).get("steps")
        parts.append(f'<h2><i class="r{number % 6}"></i> {html.escape(str(run.folder))}: step {done} of {planned}</h2>')
        if run.tokenizer is None:
            parts.append("<p>No tokenizer was found, so tokens are ids: name one with --tokenizer.</p>")

        hints = [f"<li>{html.escape(text)} ({since})</li>" for text, since in run.find_hints().items()]
        parts.append(f"<ul>{''.join(hints)}</ul>")

        versions = run.folder / "versions.json"
        if versions.exists():
            parts.append(details("versions", versions.read_text()))
        parts.append(details("configuration", (run.folder / "config.yaml").read_text()))
    return "\n".join([*parts, table_of_keys(runs)])


def details(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>"


def table_of_keys(runs: list[Run]) -> str:
    """The keys in which the runs differ; if there is one run, the keys that are not the default."""
    usual = {key: field.default for key, field in Config.model_fields.items()}
    for section, kind in SECTIONS.items():
        usual |= {f"{section}.{key}": field.get_default() for key, field in kind.model_fields.items()}

    columns = [dict(dotted_items(run.config)) for run in runs]
    title, compared = "keys that differ", columns
    if len(runs) == 1:
        title, compared = "keys that are not the default", [*columns, usual]
    every = {key for column in compared for key in column}
    keys = [key for key in every if len({repr(column.get(key)) for column in compared}) > 1]

    rows = ["<tr><th></th>" + "".join(f"<th>{html.escape(run.folder.name)}</th>" for run in runs) + "</tr>"]
    for key in sorted(keys):
        cells = "".join(f"<td>{html.escape(str(column.get(key, '–')))}</td>" for column in columns)
        rows.append(f"<tr><td>{html.escape(key)}</td>{cells}</tr>")
    return f"<details open><summary>{title}</summary><table>{''.join(rows)}</table></details>"


def build_page(title: str, runs: list[Run], megabytes: float = 60.0) -> str:
    """The page with all data; of each step as many groups of samples as fit into about `megabytes` in all.

    Its content security policy allows only its own script and style, by their digests, so that the text of a model
    cannot run or reach the network.
    """
    # The samples, thinned by what the metrics say of their number.
    tokens = 0
    for run in runs:
        for row in run.steps:
            tokens += (row.get("speed/response_tokens_per_s") or 0) * (row.get("time/step") or 0)
    share = min(1.0, megabytes * 1e6 / max(tokens * BYTES_A_TOKEN, 1.0))
    data = []
    for number, run in enumerate(runs):
        for name in run.sample_files():
            block = base64.b64encode(run.block(name, share)).decode()
            data.append(
                f'<script type="text/plain" class="block" data-run="{number}" data-file="{name}">{block}</script>'
            )

    # The metrics: those to look at first, and the others.
    names = {name for run in runs for row in run.rows for name in row} - {"step"}
    first = [name for name in FIRST if name in names] + sorted(name for name in names if name.startswith("eval/"))
    others = sorted(names - set(first))

    text = TEMPLATE.read_text()
    rules = [f"{kind}-src '{digest(text, kind)}'" for kind in ("script", "style")]
    values = {
        "policy": "; ".join(["default-src 'none'", *rules]),
        "title": html.escape(title),
        "runs": describe(runs),
        "curves": "".join(curve(name, runs) for name in first),
        "others": "".join(curve(name, runs) for name in others),
        "names": "".join(f"<option value={i}>{html.escape(str(run.folder))}</option>" for i, run in enumerate(runs)),
        "data": "\n".join(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], text)


def digest(text: str, kind: str) -> str:
    """The digest of the template's script or style for a content security policy."""
    inside = re.search(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)[1]
    return "sha256-" + base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()


def main(argv) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="output_dir of a run")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="file to write (report.html)")
    parser.add_argument("--megabytes", type=float, default=60.0, help="approximate limit for samples in the page (60)")
    parser.add_argument("--tokenizer", help="folder or hub name (the run's export, else its model.path)")
    args = parser.parse_args(argv)

    try:
        runs = [Run(folder, args.tokenizer) for folder in args.runs]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    title = ", ".join(folder.name for folder in args.runs)
    args.out.write_text(build_page(title, runs, args.megabytes), encoding="utf-8")
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
