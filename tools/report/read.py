"""A run's output folder as what the page shows of it: plain values, ready for JSON.

Reads files only, those of a run that goes on too. `Run` reads each file of samples once and remembers what the curves
need of it; the samples themselves become blocks, one a step, which the page opens when they are looked at.
"""

import gzip
import json
import math
import re
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev

import yaml
from huggingface_hub import try_to_load_from_cache

from config import UserError
from support import hints
from support.read_config import SECTIONS, validate

Z = 1.96  # of a normal distribution, for bands of 95 %
BYTES_A_TOKEN = 4.5  # of a response in the page, about: id and log-prob, compressed, as base64


class Run:
    """The folder of a run. `changed` says whether its files have, since it was last asked."""

    def __init__(self, folder: Path, tokenizer_path: str | None = None):
        if not (folder / "metrics.jsonl").exists():
            raise UserError(f"{folder}: no metrics.jsonl there; name the output_dir of a run")
        self.folder, self.notes, self.seen = folder, [], None
        self.config = yaml.safe_load((folder / "config.yaml").read_text()) or {}
        self.tokenizer = self.find_tokenizer(tokenizer_path)
        self.words = layout_in_words(self.config, folder, self.notes)
        self.samples: dict[Path, tuple[float, dict]] = {}  # of a file of samples: when it was read, what of it is kept
        self.pieces: dict[int, str] = {}  # text of a token id

    def find_tokenizer(self, given: str | None):
        """The tokenizer that was named, the run's own export, or that of model.path; None, and a note, without any."""
        from support.data import load_tokenizer

        exports = sorted(self.folder.glob("hf/step_*/tokenizer_config.json"))
        found = str(exports[-1].parent) if exports else on_this_machine(self.config.get("model", {}).get("path", ""))
        if given or found:
            try:
                return load_tokenizer(given or found)
            except ValueError as error:
                raise UserError(f"{error}; name another with --tokenizer") from None
        self.notes.append("no tokenizer was found, so tokens are shown as ids: name one with --tokenizer")
        return None

    def changed(self) -> bool:
        """Whether a file is new or longer than at the last call."""
        files = [self.folder / "metrics.jsonl", *self.sample_files().values()]
        now = [(str(file), file.stat().st_size) for file in files]
        was, self.seen = self.seen, now
        return now != was

    def sample_files(self) -> dict[str, Path]:
        """{"step_000001": file, …}, steps before evaluations."""
        folder = self.folder / "rollouts"
        found = sorted(folder.glob("step_*.jsonl")) + sorted(folder.glob("eval_*.jsonl"))
        return {file.stem: file for file in found}

    def page_data(self) -> dict:
        """All that the page shows of this run but the samples."""
        rows = read_lines(self.folder / "metrics.jsonl")
        steps = [row for row in rows if "reward/mean" in row]
        self.read_samples()
        parts = {int(file.stem.split("_")[1]): kept["parts"] for file, (_, kept) in self.samples.items()
                 if file.stem.startswith("step_")}  # fmt: skip
        steps = [row | parts.get(row["step"], {}) for row in steps]
        names = dict.fromkeys(name for row in steps for name in row if not name.startswith("eval/"))
        versions = self.folder / "versions.json"
        bands = {file.stem: kept["bands"] for file, (_, kept) in self.samples.items() if "bands" in kept}
        modified = datetime.fromtimestamp((self.folder / "metrics.jsonl").stat().st_mtime)
        return {
            "name": str(self.folder),
            "written": modified.isoformat(" ", "minutes"),
            "planned": self.config.get("train", {}).get("steps"),
            "words": self.words,
            "notes": self.notes,
            "config": flat(self.config),
            "unusual": unusual(flat(self.config)),
            "versions": json.loads(versions.read_text()) if versions.exists() else {},
            "columns": {name: [number(row.get(name)) for row in steps] for name in names},
            "evaluations": evaluations(rows, bands),
            "hints": spoken(steps),
            "files": {file.stem: {"groups": kept["groups"]} for file, (_, kept) in self.samples.items()},
        }

    def read_samples(self) -> None:
        """Read the files of samples that are new."""
        options = self.config.get("eval", {})
        for name, file in self.sample_files().items():
            if self.samples.get(file, (None,))[0] != file.stat().st_mtime:
                samples = read_lines(file)
                kept = {"groups": len({s["group"] for s in samples}), "parts": part_means(samples)}
                if name.startswith("eval_"):
                    kept["bands"] = evaluation_bands(samples, options.get("pass_reward", 1.0))
                self.samples[file] = (file.stat().st_mtime, kept)

    def block(self, name: str, share: float = 1.0) -> bytes:
        """The samples of a file for the page, JSON in gzip: its groups, or that share of them, evenly spread."""
        groups = defaultdict(list)
        for sample in read_lines(self.sample_files()[name]):
            groups[sample["group"]].append(sample)
        wanted = max(1, round(share * len(groups)))
        numbers = sorted(groups)
        numbers = numbers if share >= 1 else [numbers[i * len(numbers) // wanted] for i in range(wanted)]
        shown = [as_group(number, groups[number], texts=self.tokenizer is None) for number in numbers]
        ids = {i for group in shown for part in (group["prompt"], *(a["ids"] for a in group["answers"])) for i in part}
        content = {"groups": shown, "of": len(groups)}
        if self.tokenizer is not None:
            special = set(self.tokenizer.all_special_ids)
            content |= {"pieces": {i: self.piece(i) for i in sorted(ids)}, "special": sorted(ids & special)}
        return gzip.compress(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(), 6, mtime=0)

    def piece(self, token_id: int) -> str:
        """The text of one token. Bytes that are no character by themselves are shown as U+FFFD."""
        if token_id not in self.pieces:
            name = self.tokenizer.convert_ids_to_tokens(token_id) or f"<{token_id}>"
            text = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False) or name
            marked = name.startswith("▁") and not text.startswith(" ")  # SentencePiece drops a text's first space
            self.pieces[token_id] = " " + text if marked else text
        return self.pieces[token_id]

    def response_tokens(self) -> float:
        """Of all steps, as the metrics say."""
        rows = read_lines(self.folder / "metrics.jsonl")
        return sum((row.get("speed/response_tokens_per_s") or 0) * (row.get("time/step") or 0) for row in rows)


def on_this_machine(model: str) -> str | None:
    """The folder of a model, or of what is cached of a hub name; None where neither is there. Asks no network."""
    if Path(model).is_dir():
        return model
    cached = try_to_load_from_cache(model, "tokenizer_config.json") if re.fullmatch(r"[\w.-]+/[\w.-]+", model) else None
    return str(Path(cached).parent) if isinstance(cached, str) else None


def read_lines(path: Path) -> list[dict]:
    """The JSON objects of a file; a last line that is being written is left for the next time."""
    return [json.loads(line) for line in path.open(encoding="utf-8") if line.endswith("\n")]


def number(value, digits: int = 6):
    """A number with so many significant digits; None for what is none or not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


# ---------------------------------------------------------------- what was run


def flat(tree: dict, prefix: str = "") -> dict:
    """{"section.key": value} of a configuration. Dicts inside a key stay what they are."""
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{key}.") if not prefix and key in SECTIONS else {prefix + key: value}
    return found


def unusual(config: dict) -> list[str]:
    """The keys that have another value than their default, or no default."""
    usual = {
        f"{section}.{key}": field for section, kind in SECTIONS.items() for key, field in kind.model_fields.items()
    }
    return [key for key, value in config.items() if key not in usual or usual[key].default != value]


def layout_in_words(config: dict, folder: Path, notes: list[str]) -> str:
    """Layout, a step, the loss, as a start prints them (support/run_plan.py). Adds to `notes` what is not known."""
    from support import run_plan

    states = sorted(folder.glob("checkpoints/step_*/state.json"))
    p = config.get("parallel", {})
    ranks = json.loads(states[-1].read_text())["ranks"] if states else None
    if ranks is None:
        shapes = [[p.get(key, 1) for key in keys] for keys in (("tp", "pp", "cp"), ("etp", "ep", "pp"))]
        ranks = math.lcm(*map(math.prod, shapes), config.get("rollout", {}).get("tp", 1))
        notes.append(f"how many ranks there were stands in checkpoints, and there is none: the words are for {ranks}")
    try:
        return run_plan.describe(validate(config, str(folder / "config.yaml")), ranks)
    except (UserError, ValueError, AssertionError) as error:
        notes.append(f"config.yaml cannot be read as one of this version: {error}")
        return ""


def spoken(steps: list[dict]) -> list[dict]:
    """Every hint that the run gave, or would have (support/hints.py): since which step, and whether it still holds."""
    found, now = {}, {}
    for end in range(hints.WINDOW, len(steps) + hints.WINDOW, hints.WINDOW):
        history = steps[:end]
        try:
            now = hints.hints(history)
        except KeyError:  # a run of another version, without one of the metrics
            return []
        for rule, text in now.items():
            found.setdefault(rule, {"rule": rule.replace("_", " "), "since": history[-1]["step"]})["text"] = text
    return [hint | {"holds": rule in now} for rule, hint in found.items()]


# ---------------------------------------------------------------- from samples


def part_means(samples: list[dict]) -> dict[str, float]:
    """{"part/source/part": mean over the samples of the source}; what failed in grading has none, that is 0."""
    sums, counts = defaultdict(float), defaultdict(int)
    for s in samples:
        counts[s["source"]] += 1
        for part, value in s["reward_parts"].items():
            sums[s["source"], part] += value
    return {f"part/{source}/{part}": total / counts[source] for (source, part), total in sorted(sums.items())}


def evaluation_bands(samples: list[dict], pass_reward: float) -> dict[str, list]:
    """{"eval/source/avg@n": [mean, half a band of 95 %, prompts], …}, as support/metrics.py has the means.

    The band is that of the mean over prompts: 1.96 standard errors, std with ddof 1; None for a single prompt.
    """
    from support.metrics import pass_at_k

    groups = defaultdict(list)
    for s in samples:
        groups[s["source"], s["group"]].append(s["reward"])
    values = defaultdict(list)
    for (source, _), rewards in groups.items():
        n, passed = len(rewards), sum(reward >= pass_reward for reward in rewards)
        values[f"eval/{source}/avg@{n}"].append(fmean(rewards))
        for k in sorted({2**i for i in range(n.bit_length())} | {n}):
            values[f"eval/{source}/pass@{k}"].append(pass_at_k(n, passed, k))
    return {
        name: [number(fmean(of)), number(Z * stdev(of) / math.sqrt(len(of))) if len(of) > 1 else None, len(of)]
        for name, of in values.items()
    }


def evaluations(rows: list[dict], bands: dict[str, dict]) -> dict[str, list]:
    """{"eval/source/avg@n": [[step, mean, half a band or None, prompts or None], …], …} of all evaluations."""
    found = defaultdict(list)
    for row in rows:
        of_step = bands.get(f"eval_{row['step']:06d}", {})
        for name, value in row.items():
            if name.startswith("eval/") and "@" in name:
                _, half, prompts = of_step.get(name, [None, None, None])
                found[name].append([row["step"], number(value), half, prompts])
    return found


def rewards_of_tokens(s: dict) -> list[float | None]:
    """What each response token of a sample was given of its own, all parts together; None where nothing was."""
    found = [None] * len(s["response_ids"])
    for place, reward in (row for rows in s["token_rewards"].values() for row in rows):
        found[place] = number((found[place] or 0.0) + reward)
    return found


def as_group(number_: int, samples: list[dict], texts: bool) -> dict:
    """A prompt and its answers for the page. Values of single tokens are those that the run recorded: `rollout_logp`,
    `advantages` and `token_rewards` where tokens have rewards, and, where log.tokens asked for them, `trainer_logp`
    and `ratio` of each response token."""
    answers = []
    for s in samples:
        answer = {
            "ids": s["response_ids"],
            "logp": [number(round(x, 3)) for x in s["rollout_logp"]],
            "reward": number(s["reward"]),
            "parts": {part: number(value) for part, value in s["reward_parts"].items()},
            "advantage": number(s["advantage"]),
            "finished": s["finished"],
            "turns": s.get("turns", [len(s["response_ids"])]),  # an earlier version wrote none
            "graded": s["graded"],
            "error": s["error"],
        }
        if "advantages" in s:
            answer["advantages"] = [number(x, 4) for x in s["advantages"]]
        if "token_rewards" in s:
            answer["rewards"] = rewards_of_tokens(s)
        if "trainer_logp" in s:
            pairs = zip(s["trainer_logp"], s["rollout_logp"], strict=True)
            answer["gap"] = [number(trainer - rollout, 3) for trainer, rollout in pairs]
        if "ratio" in s:
            answer["ratio"] = [number(x, 4) for x in s["ratio"]]
        if texts:
            answer["text"] = s["text"]
        answers.append(answer)
    first = samples[0]
    return {"group": number_, "source": first["source"], "prompt": first["prompt_ids"], "answers": answers}
