"""Train TRL with the failures of the museum that its code can have (tests/museum/trl.py), and note what it says.

    python -m tools.museum_trl    trains in build/trl-venv (tools/bench_trl.py --setup makes it); writes
                                  docs/bench/museum_trl.json, from which tools.museum makes a column of its page

Each is three steps of the tiny model on two ranks, sampled with transformers. "changed" says whether the weights after
them differ from those of the same run without the failure: a mutant that changes nothing shows nothing.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from tests.museum.trl import MUTANTS, SETTINGS, mutant  # noqa: E402

RESULTS = REPO / "docs/bench/museum_trl.json"
TRL = REPO / "build/trl-venv"
RANKS = 2


def train(folder: Path, setting: str) -> str:
    """Three steps of TRL in this process, one of RANKS; the digest of the weights after them."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tools.tiny_reward import digits_in_place

    def reward(completions: list[str], answer: list[str], **_) -> list[float]:
        return [digits_in_place(text, wanted, {}) for text, wanted in zip(completions, answer, strict=True)]

    settings = {
        "output_dir": str(folder / "out"), "seed": 0, "use_cpu": True, "bf16": False, "max_steps": 3,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4,
        "max_completion_length": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "beta": 0.0,
        "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "float32"}, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "ddp_find_unused_parameters": False,
    }  # fmt: skip
    data = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=str(folder / "cache"))
    trainer = GRPOTrainer(
        model=str(folder / "model"), reward_funcs=reward, args=GRPOConfig(**settings | SETTINGS[setting]),
        train_dataset=data, processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
    )  # fmt: skip
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    digest = hashlib.sha256()
    for tensor in weights.values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def outcome(folder: Path, name: str, healthy: dict[str, str]) -> dict:
    """What a run with the failure says: {"error": its message or none, "warnings": ..., "changed": ...}."""
    failure = mutant(name)
    function = failure.find()
    own_code = function.__code__
    failure.apply()
    error, digest = "", ""
    with warnings.catch_warnings(record=True) as caught:
        try:
            digest = train(folder, failure.setting)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
        finally:
            function.__code__ = own_code
    heard = sorted({str(warning.message).partition("\n")[0] for warning in caught})
    return {"error": error, "warnings": heard, "changed": digest != healthy[failure.setting]}


def run_rank(folder: Path) -> None:
    """One rank of TRL, in its environment: every setting without a failure, then every failure."""
    healthy = {setting: train(folder, setting) for setting in SETTINGS}
    results = {}
    for name in MUTANTS:
        results[name] = outcome(folder, name, healthy)
        if os.environ["RANK"] == "0":
            print(name, results[name], flush=True)
    if os.environ["RANK"] == "0":
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    folder = parser.parse_args().rank
    if folder:
        run_rank(folder)
        return
    from tools.museum import write_models

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_models(folder)
        launch = [TRL / "bin/python", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        subprocess.run([*launch, __file__, "--rank", folder], cwd=REPO, env=environment, check=True)
        RESULTS.write_text((folder / "results.json").read_text())


if __name__ == "__main__":
    main()
