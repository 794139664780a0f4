"""Train a configuration here and with TRL, with several seeds each, and compare how the reward rises.

    python benchmarks/learning_curves.py                 # the demo: 5 seeds of each into docs/bench/learning.csv
    python benchmarks/learning_curves.py --config configs/smollm2.yaml --csv docs/bench/learning-smollm2.csv

Both train the same model folder on the same prompts with the same reward, on two ranks: prompts and answers a step, one
update a step, token-mean loss, advantages over the group's standard deviation, no KL, entropy bonus, Adam, learning
rate and clipping are those of the configuration. TRL samples with transformers, and computes bf16 by autocast over
weights in fp32. What differs beside: the order of the prompts and the seeds of sampling; 1e-4 beside the standard
deviation where ours has 1e-6; TRL's warm-up begins with a learning rate of 0 where ours begins with a tenth of it.

A curve that is in the CSV is not trained again. A row of it has the mean reward of the steps since the row before.
TRL runs in an environment of its own: benchmarks/theirs.py --setup build/trl-venv makes it.
"""

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean

import pandas

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks.against_trl import LAUNCH, RANKS, TRL, run  # noqa: E402

SHOWN = (1 / 6, 1 / 3, 2 / 3, 1)  # of the rows, in the table
WINDOW = 1 / 30  # of the steps, at least 5: the mean reward of so many is a row of the CSV
NAMES = {"ours": "train_grpo", "trl": "TRL 1.16, transformers"}


# ---------------------------------------------------------------- one run


def train_ours(config: str, keys: list[str], folder: Path) -> list[float]:
    """Train the configuration with these keys. Returns the mean reward of the sampled answers of each step."""
    command = [sys.executable, *LAUNCH, "train_grpo.py", "--config", config, *keys]
    start([*command, f"output_dir={folder}", "train.save_every=0", "train.eval_every=0"], folder.name)
    return [json.loads(line)["reward/mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_trl(config: str, keys: list[str], folder: Path) -> list[float]:
    from grpo.parts.base.read_config import load_config

    cfg = load_config(str(REPO / config), keys)
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

    import reward as rewards
    from examples.tiny_reward import digits_in_place

    cfg = json.loads((folder / "config.json").read_text())
    train, algo, rollout = cfg["train"], cfg["algo"], cfg["rollout"]
    assert algo["kl_coef"] == 0 and algo["advantage"] == "grpo" and algo["loss_norm"] == "token_mean"
    options = GRPOConfig(
        output_dir=str(folder), seed=cfg["seed"], use_cpu=True, bf16=cfg["model"]["dtype"] == "bf16",
        max_steps=train["steps"],
        per_device_train_batch_size=rollout["prompts_per_step"] * rollout["group_size"] // RANKS,
        gradient_accumulation_steps=1, num_generations=rollout["group_size"], num_iterations=1,
        max_completion_length=rollout["max_new_tokens"], temperature=rollout["temperature"],
        learning_rate=train["lr"], lr_scheduler_type="constant_with_warmup", warmup_steps=train["warmup_steps"],
        weight_decay=train["weight_decay"], adam_beta1=train["adam_beta1"], adam_beta2=train["adam_beta2"],
        max_grad_norm=train["clip_grad"], beta=0.0, entropy_coef=algo["entropy_coef"], loss_type="dapo",
        scale_rewards="group", gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip

    chat = cfg["reward"]["default"] == "gsm8k"  # of SmolLM2; the demo has a tokenizer without a template
    grade = rewards.gsm8k if chat else digits_in_place

    def reward(completions: list, answer: list[str], **_) -> list[float]:
        texts = [completion[0]["content"] if chat else completion for completion in completions]
        return [grade(text, wanted, {}) for text, wanted in zip(texts, answer, strict=True)]

    model = cfg["model"]["path"]
    data = load_dataset("json", data_files=cfg["data"]["train"], split="train", cache_dir=str(folder / "cache"))
    if chat:
        data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
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


def thin(rewards: list[float]) -> dict[int, float]:
    """{step: mean reward of the window that ends with it}, of the rewards of steps 1, 2, ..."""
    window = max(round(WINDOW * len(rewards)), 5)
    return {end: mean(rewards[end - window : end]) for end in range(window, len(rewards) + 1, window)}


def table(curves: pandas.DataFrame) -> str:
    """Mean over the seeds of the reward at each row in SHOWN, lowest and highest."""
    found = curves.groupby(["step", "system"]).reward.agg(["mean", "min", "max"])
    lines = ["| step | " + " | ".join(NAMES.values()) + " |", "|---" * (1 + len(NAMES)) + "|"]
    steps = found.index.levels[0]
    for step in [steps[round(share * len(steps)) - 1] for share in SHOWN]:
        rows = [found.loc[step, system] for system in NAMES]
        cells = [f"{row['mean']:.3f} ({row['min']:.3f} to {row['max']:.3f})" for row in rows]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/tiny.yaml")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the configuration")
    parser.add_argument("--csv", type=Path, default=REPO / "docs/bench/learning.csv")
    parser.add_argument("--seeds", type=int, default=5, help="of each system")
    parser.add_argument("--trl", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl:
        trl_rank(args.trl)
        return
    if not args.csv.exists():
        args.csv.write_text("system,seed,step,reward\n")
    with tempfile.TemporaryDirectory() as folder:
        for seed, (system, train) in itertools.product(range(args.seeds), SYSTEMS.items()):
            done = pandas.read_csv(args.csv)
            if ((done.system == system) & (done.seed == seed)).any():
                continue
            rewards = train(args.config, [f"seed={seed}", *args.set], Path(folder, f"{system}_{seed}"))
            with args.csv.open("a") as file:
                file.writelines(f"{system},{seed},{step},{value:.6f}\n" for step, value in thin(rewards).items())
            print(f"{system}, seed {seed}: {mean(rewards[-5:]):.3f}", flush=True)
    print(table(pandas.read_csv(args.csv)))


if __name__ == "__main__":
    main()
