"""The second trainer repeats short real runs in which every pair of a capability and a layout is."""

import time

import make_tiny
import pytest

from tests.conftest import REPO, ForkedTraining, write_rows
from tests.fork_server import ForkServer
from tests.oracle.comparison import Comparison
from tests.oracle.pairs import EXPERTS, FACTORS, Run, all_pairs, cover, pairs_of
from tests.oracle.recorded import read_run
from tests.oracle.trainer import repeat
from tests.test_forks import apply, git_apply

RUNS = cover()
COMMON = (
    "train.steps=3", "train.lr=0.003", "train.warmup_steps=2", "train.save_every=0", "train.export_every=1",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "algo.entropy_coef=0.02",
    "train.max_tokens_per_micro_batch=64", "train.logprob_max_tokens_per_micro_batch=48",
)  # fmt: skip
TOKEN_REWARDS = '''
def digits(text, answer, row, response_ids):
    """A reward at each token that is a digit of the answer, and one for the whole that few answers share."""
    wanted = [2 + int(c) for c in answer]
    right = [float(i < len(wanted) and token == wanted[i]) / 3 for i, token in enumerate(response_ids)]
    begins = [(0, len(text) // 2, float(text[:1] == answer[:1]) / 5)]
    whole = sum(i * token for i, token in enumerate(response_ids, 1)) % 17 / 50
    return {"digits": right, "begins": begins, "whole": whole}


def digits_of_odd(text, answer, row, response_ids):
    """The same, but nothing for an even answer: dynamic sampling replaces its group."""
    if int(answer) % 2 == 0:
        return {"digits": [0.0] * len(response_ids), "whole": 0.0}
    return digits(text, answer, row, response_ids)
'''


def name_of(run: Run) -> str:
    """The values of a run that are not off."""
    parts = []
    for factor, value in run.items():
        if factor in ("layout", "dtype", "algorithm"):
            parts.append(value)
        elif value == "on":
            parts.append(factor)
        elif value not in ("off", "none", "1"):
            parts.append(f"{factor} {value}")
    return ", ".join(parts)


def test_every_pair_is_in_some_run():
    covered = set().union(*map(pairs_of, RUNS))
    assert covered == all_pairs()
    assert len(RUNS) <= 28
    assert all(run.keys() == FACTORS.keys() for run in RUNS)
    assert not any(run["algorithm"] == "old by vLLM" and run["kl"] == "reward" for run in RUNS)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Models, data, rewards."""
    folder = tmp_path_factory.mktemp("pairs")
    tokenizer = make_tiny.char_tokenizer("0123456789>+-=")
    make_tiny.save_model(folder / "qwen2", tokenizer, hidden=64, layers=4, ffn=2)
    make_tiny.save_model(folder / "qwen3_moe", tokenizer, "qwen3_moe", tied=False, hidden=64, layers=4)
    make_tiny.save_model(folder / "teacher", tokenizer, "qwen3", tied=False, hidden=64, layers=4, seed=5)
    make_tiny.save_model(folder / "teacher_moe", tokenizer, "mixtral", tied=False, hidden=64, layers=2, seed=5)
    write_rows(folder / "train.jsonl", make_tiny.reversal_rows(3, 200, seed=0))
    (folder / "token_rewards.py").write_text(TOKEN_REWARDS)
    return folder


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """A ForkServer of the script with the recipes of past weights and of token rewards, and that script."""
    folder = tmp_path_factory.mktemp("pairs") / "fork"
    apply("stale_samples", folder)
    assert git_apply("token_rewards", folder) == ""
    server = ForkServer(folder)
    yield server, folder / "train_grpo.py"
    server.close()


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """pairs.md of --basetemp, which gets a line for each run."""
    file = tmp_path_factory.getbasetemp() / "pairs.md"
    file.write_text("| run | values | largest difference / bound | seconds: run, audit |\n|---|---|---|---|\n")
    return file


def overrides_of(run: Run, material) -> list[str]:
    """The overrides of a run."""
    has_experts = run["layout"] in EXPERTS or run["routes"] == "on"
    family = "qwen3_moe" if has_experts else "qwen2"
    teacher = "teacher_moe" if run["layout"] in EXPERTS else "teacher"  # a dense one is refused there
    chosen = [f"model.path={material}/{family}", f"data.train={material}/train.jsonl"]
    for factor, value in run.items():
        chosen += [text.replace("{teacher}", f"{material}/{teacher}") for text in FACTORS[factor][value]]
    if run["turns"] == "on":
        chosen += [
            "data.train=123", "data.custom=tools/tiny_turns.py:rows", "rollout.max_new_tokens=5",
            "rollout.turns=tools/tiny_turns.py:higher_or_lower", "rollout.max_turns=2",
            "reward.custom=tools/tiny_turns.py:won",
        ]  # fmt: skip
    if run["token rewards"] == "on":
        function = "digits_of_odd" if run["dynamic sampling"] == "on" else "digits"
        chosen.append(f"reward.custom={material}/token_rewards.py:{function}")
    if run["lag"] == "on" and run["kl"] != "none":
        chosen.append("algo.reference_every=2")
    if run["dtype"] == "bf16":
        chosen.append("rollout.max_logp_gap=inf")
        if "algo.correction=icepop" in chosen:  # it drops a token at its bounds, where rounding decides which
            chosen.append("algo.correction=tis")
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{i:02d}" for i in range(len(RUNS))])
def test_a_run_is_what_the_second_trainer_makes_of_it(number, fork_server, tiny, tmp_path, material, forked, table):
    run = RUNS[number]
    server, script = fork_server, REPO / "train_grpo.py"
    overrides = (*COMMON, *overrides_of(run, material))
    if "on" in (run["lag"], run["token rewards"], run["routes"]):  # rollouts/ has the routes with log.tokens
        server, script = forked
        overrides += ("log.tokens=true",)
    start = time.monotonic()
    training = ForkedTraining(server, tiny, tmp_path / "out", *overrides, script=script, nproc=2)
    assert training.code == 0, training.text
    trained = time.monotonic()
    comparison = Comparison(run["dtype"])
    repeat(read_run(training.out), comparison)
    ended = time.monotonic()
    values = sum(quantity.count for quantity in comparison.quantities.values())
    worst, quantity = max(comparison.quantities.items(), key=lambda item: item[1].share)
    with table.open("a") as file:
        share = f"{quantity.share:.2f} ({worst})"
        file.write(f"| {name_of(run)} | {values:,} | {share} | {trained - start:.0f}, {ended - trained:.0f} |\n")
    assert comparison.first is None, f"{name_of(run)}\n{comparison.table()}\n{comparison.first}"
