"""Train the demo (configs/tiny.yaml) here and with TRL, with several seeds each, and compare how the reward rises.

    python benchmarks/learning_curves.py                 # 5 seeds of each into docs/bench/learning.csv, and the table

Both train the same model folder on the same prompts with the same reward, in fp32 on two ranks: prompts and answers a
step, one update a step, token-mean loss, advantages over the group's standard deviation, no KL, entropy bonus, Adam,
learning rate and clipping are those of the configuration. TRL samples with transformers. What differs: the order of the
prompts and the seeds of sampling; 1e-4 beside the standard deviation where ours has 1e-6; TRL's warm-up begins with a
learning rate of 0 where ours begins with a tenth of it.

A curve that is in the CSV is not trained again. TRL runs in build/trl-venv (benchmarks/theirs.py --setup makes it).
"""

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks.against_trl import LAUNCH, RANKS, TRL, run  # noqa: E402

CURVES = REPO / "docs/bench/learning.csv"
CONFIG = "configs/tiny.yaml"
SHOWN = (50, 100, 200, 300)  # steps in the table
WINDOW = 10  # a value is the mean over so many steps up to the one that is named
NAMES = {"ours": "train_grpo", "trl": "TRL 1.16, transformers"}
Curve = list[float]  # mean reward of the sampled answers at steps 1, 2, ...


# ---------------------------------------------------------------- one run


def train_ours(seed: int, folder: Path) -> Curve:
    """Train the configuration with a seed."""
    command = [sys.executable, *LAUNCH, "train_grpo.py", "--config", CONFIG, f"seed={seed}"]
    start([*command, f"output_dir={folder}", "train.save_every=0"], folder.name)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward/mean"] for line in lines]


def train_trl(seed: int, folder: Path) -> Curve:
    """Train TRL with the same settings and a seed, in its own environment."""
    from support.base.read_config import load_config

    cfg = load_config(str(REPO / CONFIG), [f"seed={seed}"])
    folder.mkdir()
    (folder / "config.json").write_text(cfg.model_dump_json())
    start([str(TRL / "bin/python"), *LAUNCH, __file__, "--trl", str(folder)], folder.name)
    return json.loads((folder / "curve.json").read_text())


def start(command: list[str], name: str) -> None:
    """Run a command in the repository. Raises SystemExit where it fails."""
    if not run(command, name, timeout_s=7200):
        raise SystemExit(1)


def trl_rank(folder: Path) -> None:
    """A rank of TRL's run, in TRL's environment: writes curve.json."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tools.tiny_reward import digits_in_place

    cfg = json.loads((folder / "config.json").read_text())
    train, algo, rollout = cfg["train"], cfg["algo"], cfg["rollout"]
    assert algo["kl_coef"] == 0 and algo["advantage"] == "grpo" and algo["loss_norm"] == "token_mean"
    options = GRPOConfig(
        output_dir=str(folder), seed=cfg["seed"], use_cpu=True, bf16=False, max_steps=train["steps"],
        per_device_train_batch_size=rollout["prompts_per_step"] * rollout["group_size"] // RANKS,
        gradient_accumulation_steps=1, num_generations=rollout["group_size"], num_iterations=1,
        max_completion_length=rollout["max_new_tokens"], temperature=rollout["temperature"],
        learning_rate=train["lr"], lr_scheduler_type="constant_with_warmup", warmup_steps=train["warmup_steps"],
        weight_decay=train["weight_decay"], adam_beta1=train["adam_beta1"], adam_beta2=train["adam_beta2"],
        max_grad_norm=train["clip_grad"], beta=0.0, entropy_coef=algo["entropy_coef"], loss_type="dapo",
        scale_rewards="group", gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip

    def reward(completions: list[str], answer: list[str], **_) -> list[float]:
        return [digits_in_place(text, wanted, {}) for text, wanted in zip(completions, answer, strict=True)]

    model = cfg["model"]["path"]
    data = load_dataset("json", data_files=cfg["data"]["train"], split="train", cache_dir=str(folder / "cache"))
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=options, train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero():
        curve = [line["reward"] for line in trainer.state.log_history if "reward" in line]
        (folder / "curve.json").write_text(json.dumps(curve))


SYSTEMS = {"ours": train_ours, "trl": train_trl}

# ---------------------------------------------------------------- all runs


def read_curves() -> dict[tuple[str, int], Curve]:
    """{(system, seed): curve} of the CSV, whose columns are system, seed, step, reward."""
    curves = {}
    for line in CURVES.read_text().splitlines()[1:]:
        system, seed, _, reward = line.split(",")
        curves.setdefault((system, int(seed)), []).append(float(reward))
    return curves


def table(curves: dict[tuple[str, int], Curve]) -> str:
    """Mean over the seeds of the last WINDOW rewards, lowest and highest, at the steps in SHOWN."""
    lines = ["| step | " + " | ".join(NAMES.values()) + " |", "|---" * (1 + len(NAMES)) + "|"]
    for step in SHOWN:
        cells = []
        for system in NAMES:
            values = [mean(curve[step - WINDOW : step]) for (of, _), curve in curves.items() if of == system]
            cells.append(f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="of each system")
    parser.add_argument("--trl", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl:
        trl_rank(args.trl)
        return
    with tempfile.TemporaryDirectory() as folder:
        for seed, (system, train) in itertools.product(range(args.seeds), SYSTEMS.items()):
            if (system, seed) in read_curves():
                continue
            curve = train(seed, Path(folder, f"{system}_{seed}"))
            with CURVES.open("a") as file:
                file.writelines(f"{system},{seed},{step},{value:.6f}\n" for step, value in enumerate(curve, 1))
            print(f"{system}, seed {seed}: {mean(curve[-WINDOW:]):.3f}", flush=True)
    print(table(read_curves()))


if __name__ == "__main__":
    main()
