"""Read the output folder of a run into plain values for the page, ready for JSON.

Only reads files, also while a run writes them. `Run` reads each file of samples once and keeps the values for curves.
The samples become blocks, one per step, which the page unpacks on demand.
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
from support.base.read_config import SECTIONS, validate
from support.run import dead_runs, hints

Z = 1.96  # quantile of the normal distribution for 95 % bands
BYTES_A_TOKEN = 4.5  # of the page per response token, about: id and log-prob, compressed, as base64


class Run:
    """The output folder of a run. Raises UserError if it has no metrics.jsonl."""

    def __init__(self, folder: Path, tokenizer_path: str | None = None):
        if not (folder / "metrics.jsonl").exists():
            raise UserError(f"{folder}: no metrics.jsonl there; name the output_dir of a run")
        self.folder = folder
        self.notes: list[str] = []  # for the reader of the page
        self.seen: list[tuple[str, int]] | None = None  # files and their sizes at the last has_changed
        self.config = yaml.safe_load((folder / "config.yaml").read_text()) or {}
        self.tokenizer = self.find_tokenizer(tokenizer_path)
        self.words = describe_layout(self.config, folder, self.notes)
        self.samples: dict[Path, tuple[float, dict]] = {}  # file of samples → (mtime, values kept)
        self.pieces: dict[int, str] = {}  # token id → text

    def find_tokenizer(self, given: str | None):
        """Load the `given` tokenizer, else that of the run's export or of model.path; None and a note without any."""
        from support.data.prompts import load_tokenizer

        exports = sorted(self.folder.glob("hf/step_*/tokenizer_config.json"))
        found = str(exports[-1].parent) if exports else find_local_model(self.config.get("model", {}).get("path", ""))
        if given or found:
            try:
                return load_tokenizer(given or found)
            except ValueError as error:
                raise UserError(f"{error}; name another with --tokenizer") from None
        self.notes.append("no tokenizer was found, so tokens are shown as ids: name one with --tokenizer")
        return None

    def has_changed(self) -> bool:
        """Return whether a file is new or has another size since the last call."""
        files = [self.folder / "metrics.jsonl", *self.sample_files().values()]
        now = [(str(file), file.stat().st_size) for file in files]
        changed = now != self.seen
        self.seen = now
        return changed

    def sample_files(self) -> dict[str, Path]:
        """Return {"step_000001": file, …}, steps before evaluations."""
        folder = self.folder / "rollouts"
        found = sorted(folder.glob("step_*.jsonl")) + sorted(folder.glob("eval_*.jsonl"))
        return {file.stem: file for file in found}

    def page_data(self) -> dict:
        """Return all data of this run for the page except the samples."""
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
            "config": flatten_config(self.config),
            "unusual": find_changed_keys(flatten_config(self.config)),
            "versions": json.loads(versions.read_text()) if versions.exists() else {},
            "columns": {name: [round_number(row.get(name)) for row in steps] for name in names},
            "evaluations": collect_evaluations(rows, bands),
            "hints": collect_hints(steps) + self.collect_diagnoses(steps),
            "files": {file.stem: {"groups": kept["groups"]} for file, (_, kept) in self.samples.items()},
        }

    def collect_diagnoses(self, steps: list[dict]) -> list[dict]:
        """Return every diagnosis of support/run/dead_runs.py, as collect_hints does; none for the configuration or the
        metrics of another version.
        """
        try:
            diagnosis = dead_runs.Diagnosis(validate(self.config, str(self.folder / "config.yaml")))
        except UserError:
            return []
        found, now = {}, {}
        for step in steps:
            try:
                now = diagnosis.add(step)
            except KeyError:
                return []
            for rule, text in now.items():
                found.setdefault(rule, {"rule": rule.replace("_", " "), "since": step["step"]})["text"] = text
        return [told | {"holds": rule in now} for rule, told in found.items()]

    def read_samples(self) -> None:
        """Read the files of samples that are new or modified."""
        options = self.config.get("eval", {})
        for name, file in self.sample_files().items():
            if self.samples.get(file, (None,))[0] != file.stat().st_mtime:
                samples = read_lines(file)
                kept = {"groups": len({s["group"] for s in samples}), "parts": compute_part_means(samples)}
                if name.startswith("eval_"):
                    kept["bands"] = evaluation_bands(samples, options.get("pass_reward", 1.0))
                self.samples[file] = (file.stat().st_mtime, kept)

    def block(self, name: str, share: float = 1.0) -> bytes:
        """Return the samples of a file as gzipped JSON: all groups, or that share of them, evenly spaced."""
        groups = defaultdict(list)
        for sample in read_lines(self.sample_files()[name]):
            groups[sample["group"]].append(sample)
        wanted = max(1, round(share * len(groups)))
        numbers = sorted(groups)
        if share < 1:
            numbers = [numbers[i * len(numbers) // wanted] for i in range(wanted)]
        shown = [build_group(number, groups[number], texts=self.tokenizer is None) for number in numbers]
        content = {"groups": shown, "of": len(groups)}
        if self.tokenizer is not None:
            ids = set()
            for group in shown:
                ids.update(group["prompt"])
                for answer in group["answers"]:
                    ids.update(answer["ids"])
            special = set(self.tokenizer.all_special_ids)
            content |= {"pieces": {i: self.token_text(i) for i in sorted(ids)}, "special": sorted(ids & special)}
        return gzip.compress(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(), 6, mtime=0)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token. Bytes that are no character by themselves become U+FFFD."""
        if token_id not in self.pieces:
            name = self.tokenizer.convert_ids_to_tokens(token_id) or f"<{token_id}>"
            text = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False) or name
            marked = name.startswith("▁") and not text.startswith(" ")  # SentencePiece drops a text's first space
            self.pieces[token_id] = " " + text if marked else text
        return self.pieces[token_id]

    def response_tokens(self) -> float:
        """Return the number of response tokens of all steps, from the metrics."""
        rows = read_lines(self.folder / "metrics.jsonl")
        return sum((row.get("speed/response_tokens_per_s") or 0) * (row.get("time/step") or 0) for row in rows)


def find_local_model(model: str) -> str | None:
    """Return the folder of a model, or of a hub name in the cache; None if neither exists. Uses no network."""
    if Path(model).is_dir():
        return model
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return None
    cached = try_to_load_from_cache(model, "tokenizer_config.json")
    return str(Path(cached).parent) if isinstance(cached, str) else None


def read_lines(path: Path) -> list[dict]:
    """Return the JSON objects of a file without an incomplete last line."""
    return [json.loads(line) for line in path.open(encoding="utf-8") if line.endswith("\n")]


def round_number(value, digits: int = 6):
    """Return a number with so many significant digits; None for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


# ---------------------------------------------------------------- configuration, layout, hints


def flatten_config(tree: dict, prefix: str = "") -> dict:
    """Return {"section.key": value} of a configuration. Dicts that are values of keys stay dicts."""
    found = {}
    for key, value in tree.items():
        if not prefix and key in SECTIONS:
            found |= flatten_config(value, f"{key}.")
        else:
            found[prefix + key] = value
    return found


def find_changed_keys(config: dict) -> list[str]:
    """Return the keys whose value differs from the default, or that have no default."""
    usual = {
        f"{section}.{key}": field for section, kind in SECTIONS.items() for key, field in kind.model_fields.items()
    }
    return [key for key, value in config.items() if key not in usual or usual[key].default != value]


def describe_layout(config: dict, folder: Path, notes: list[str]) -> str:
    """Return layout, step and loss as printed at the start (support/check/run_plan.py). Adds what is unknown to
    `notes`.
    """
    from support.check import run_plan

    states = sorted(folder.glob("checkpoints/step_*/state.json"))
    p = config.get("parallel", {})
    ranks = json.loads(states[-1].read_text())["ranks"] if states else None
    if ranks is None:
        shapes = [[p.get(key, 1) for key in keys] for keys in (("tp", "pp", "cp"), ("etp", "ep", "pp"))]
        ranks = math.lcm(*map(math.prod, shapes), config.get("rollout", {}).get("tp", 1))
        notes.append(f"the number of ranks is stored in checkpoints, and there is none; this describes {ranks} ranks")
    try:
        return run_plan.describe(validate(config, str(folder / "config.yaml")), ranks)
    except (UserError, ValueError, AssertionError) as error:
        notes.append(f"config.yaml is not valid in this version: {error}")
        return ""


def collect_hints(steps: list[dict]) -> list[dict]:
    """Return every hint of support/run/hints.py for these steps: since which step, and whether it still holds."""
    found = {}
    now = {}
    for end in range(hints.WINDOW, len(steps) + hints.WINDOW, hints.WINDOW):
        history = steps[:end]
        try:
            now = hints.hints(history)
        except KeyError:  # a run of another version lacks one of the metrics
            return []
        for rule, text in now.items():
            found.setdefault(rule, {"rule": rule.replace("_", " "), "since": history[-1]["step"]})["text"] = text
    return [hint | {"holds": rule in now} for rule, hint in found.items()]


# ---------------------------------------------------------------- samples


def compute_part_means(samples: list[dict]) -> dict[str, float]:
    """Return {"part/source/part": mean over the samples of the source}. A sample that failed in grading counts as 0."""
    sums, counts = defaultdict(float), defaultdict(int)
    for s in samples:
        counts[s["source"]] += 1
        for part, value in s["reward_parts"].items():
            sums[s["source"], part] += value
    return {f"part/{source}/{part}": total / counts[source] for (source, part), total in sorted(sums.items())}


def evaluation_bands(samples: list[dict], pass_reward: float) -> dict[str, list]:
    """Return {"eval/source/avg@n": [mean, half-width of the 95 % band, prompts], …}; means as in
    support/step/metrics.py.

    The band is that of the mean over prompts: 1.96 standard errors, std with ddof 1; None for a single prompt.
    """
    from support.step.metrics import pass_at_k

    groups = defaultdict(list)
    for s in samples:
        groups[s["source"], s["group"]].append(s["reward"])
    values = defaultdict(list)
    for (source, _), rewards in groups.items():
        n = len(rewards)
        passed = sum(reward >= pass_reward for reward in rewards)
        values[f"eval/{source}/avg@{n}"].append(fmean(rewards))
        for k in sorted({2**i for i in range(n.bit_length())} | {n}):
            values[f"eval/{source}/pass@{k}"].append(pass_at_k(n, passed, k))
    return {
        name: [
            round_number(fmean(of)),
            round_number(Z * stdev(of) / math.sqrt(len(of))) if len(of) > 1 else None,
            len(of),
        ]
        for name, of in values.items()
    }


def collect_evaluations(rows: list[dict], bands: dict[str, dict]) -> dict[str, list]:
    """Return {"eval/source/avg@n": [[step, mean, half-width or None, prompts or None], …], …} of all evaluations."""
    found = defaultdict(list)
    for row in rows:
        of_step = bands.get(f"eval_{row['step']:06d}", {})
        for name, value in row.items():
            if name.startswith("eval/") and "@" in name:
                _, half, prompts = of_step.get(name, [None, None, None])
                found[name].append([row["step"], round_number(value), half, prompts])
    return found


def sum_token_rewards(s: dict) -> list[float | None]:
    """Return the sum of the token rewards of each response token over all parts; None for tokens without one."""
    found = [None] * len(s["response_ids"])
    for place, reward in (row for rows in s["token_rewards"].values() for row in rows):
        found[place] = round_number((found[place] or 0.0) + reward)
    return found


def build_group(number: int, samples: list[dict], texts: bool) -> dict:
    """Return a prompt and its answers for the page.

    Values per token are those in the file: `rollout_logp`; `advantages` and `token_rewards` if tokens have rewards; and
    `trainer_logp` and `ratio` with log.tokens=true.
    """
    answers = []
    for s in samples:
        answer = {
            "ids": s["response_ids"],
            "logp": [round_number(round(x, 3)) for x in s["rollout_logp"]],
            "reward": round_number(s["reward"]),
            "parts": {part: round_number(value) for part, value in s["reward_parts"].items()},
            "advantage": round_number(s["advantage"]),
            "finished": s["finished"],
            "turns": s.get("turns", [len(s["response_ids"])]),  # earlier versions wrote none
            "graded": s["graded"],
            "error": s["error"],
        }
        if "advantages" in s:
            answer["advantages"] = [round_number(x, 4) for x in s["advantages"]]
        if "token_rewards" in s:
            answer["rewards"] = sum_token_rewards(s)
        if "trainer_logp" in s:
            pairs = zip(s["trainer_logp"], s["rollout_logp"], strict=True)
            answer["gap"] = [round_number(trainer - rollout, 3) for trainer, rollout in pairs]
        if "ratio" in s:
            answer["ratio"] = [round_number(x, 4) for x in s["ratio"]]
        if texts:
            answer["text"] = s["text"]
        answers.append(answer)
    first = samples[0]
    return {"group": number, "source": first["source"], "prompt": first["prompt_ids"], "answers": answers}
