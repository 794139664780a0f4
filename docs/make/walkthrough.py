"""Write docs/walkthrough.md: one prompt of the demo from text to gradient, with the numbers of a real run.

    make walkthrough        or, once build/tiny exists:
    torchrun --standalone --nproc_per_node=1 docs/make/walkthrough.py [--step N]

Trains the demo on one rank. Step N takes few prompts and answers, so that all of it can be printed; one more shows that
its weights have reached vLLM. The functions of train_grpo.py run as they are; their arguments and results are recorded.
Quotes are looked up by function and first words, so that an edit elsewhere changes none.
"""

import argparse
import ast
import functools
import inspect
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO))
SMALL = {"rollout.prompts_per_step": 2, "rollout.group_size": 6}  # in the step that is shown

# The text, with {names} of values and [[FILE FUNCTION LINES: START]] where it quotes code: so many lines of a function,
# at least a whole statement, from the line that START stands in.
TEMPLATE = REPO / "docs/make/walkthrough.template"
QUOTE = re.compile(r"^\[\[(\S+) (\S+) (\d+): (.+)\]\]$", re.MULTILINE)
QUOTES = [(file, function, int(count), start) for file, function, count, start in QUOTE.findall(TEMPLATE.read_text())]
QUOTED = re.compile(r"\[([\w/]+\.py)\]\(\S+\), in `([\w.]+)`:\n```python\n.*?```", re.DOTALL)
SIMPLE = ast.Assign | ast.Return | ast.Expr


def quote(file: str, function: str, count: int, start: str) -> str:
    """The lines of one of QUOTES as they are now, under a link to their file. Raises LookupError."""
    change = "change docs/make/walkthrough.template"
    text = (REPO / file).read_text()
    scope: ast.AST = ast.parse(text)
    for part in function.split("."):
        found = [node for node in ast.walk(scope) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        scope = next((node for node in found if node.name == part), None)
        if scope is None:
            raise LookupError(f"{file} has no {function}: {change}")
    lines = text.splitlines()
    numbers = range(scope.lineno, scope.end_lineno + 1)
    first = next((number for number in numbers if start in lines[number - 1]), None)
    if first is None:
        raise LookupError(f"{file}, {function}: no line with {start!r}: {change}")
    statements = [node for node in ast.walk(scope) if isinstance(node, SIMPLE) and node.lineno == first]
    last = max([first + count - 1, *(node.end_lineno for node in statements)])
    code = textwrap.dedent("\n".join(lines[first - 1 : last]))
    return f"[{file}](../{file}), in `{function}`:\n```python\n{code}\n```"


# ---------------------------------------------------------------- the run


class Tape:
    """Records the calls of a step: `calls` is {name: [(arguments by name, result)]}."""

    def __init__(self):
        self.calls: dict[str, list[tuple[dict, object]]] = {}

    def watch(self, owner, name: str, before: Callable[[dict], None] = lambda arguments: None) -> None:
        """Record each call of the function `owner.name`; `before` sees the arguments first."""
        function = getattr(owner, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def watched(*args, **kwargs):
            arguments = signature.bind(*args, **kwargs).arguments
            before(arguments)
            result = function(*args, **kwargs)
            self.calls.setdefault(name, []).append((arguments, result))
            return result

        setattr(owner, name, watched)

    def result(self, name: str):
        """What the last call returned."""
        _, result = self.calls[name][-1]
        return result

    def argument(self, name: str, argument: str):
        """An argument of the last call."""
        arguments, _ = self.calls[name][-1]
        return arguments[argument]


def record(shown: int) -> SimpleNamespace:
    """Run the demo up to the step after `shown`; returns what the text needs, by name."""
    import train_grpo

    tape = Tape()
    seen = SimpleNamespace(tape=tape, step=shown)
    config_at, train_step = train_grpo.config_at, train_grpo.train_step

    def small_step(cfg, step):
        used = config_at(cfg, step)
        return train_grpo.override(used, SMALL) if step == shown else used

    def keep_gradient(arguments):
        arguments["logp_T"].register_hook(lambda gradient_T: tape.calls.update(gradient=[({}, gradient_T)]))

    def copy_weights(run):
        return {name: weight.clone() for name, weight in train_grpo.bridge.hf_weights(run.model)}

    def watched_step(run, step):
        if step == shown:
            seen.run = run
            seen.before = copy_weights(run)
        tape.calls = {}
        metrics, *others = train_step(run, step)
        if step == shown:
            seen.calls = tape.calls
            seen.cfg = train_grpo.config_at(run.cfg, step)
            seen.metrics = metrics
            seen.after = copy_weights(run)
            seen.rescored_F = train_grpo.score(run.model, tape.result("flatten"), seen.cfg)
        if step == shown + 1:
            seen.next_metrics = metrics
        return metrics, *others

    train_grpo.config_at = small_step
    train_grpo.train_step = watched_step
    for name in ("collect", "sample_and_grade", "flatten", "forward_backward", "policy_loss"):
        tape.watch(train_grpo, name)
    tape.watch(train_grpo, "grpo_loss", before=keep_gradient)
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"output_dir={folder}/out", f"train.steps={shown + 1}", "train.save_every=0"]
        code = train_grpo.main(["--config", "configs/tiny.yaml", *keys])
    if code:
        raise SystemExit(code)
    tape.calls = seen.calls
    return seen


# ---------------------------------------------------------------- the text


def make_table(head: str, rows: list[list]) -> str:
    """A table in Markdown; floats with four digits after the point."""
    names = head.split(" | ")
    lines = [names, ["---"] * len(names)]
    for row in rows:
        lines.append([f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def choose(v: SimpleNamespace) -> None:
    """Add what all parts of the text show to `v`: one group, one answer of it, and the row it is packed in."""
    v.kept = v.tape.result("collect").kept
    groups = {s.group for s in v.kept}
    rewards = {group: {s.reward for s in v.kept if s.group == group} for group in groups}
    v.group = max(groups, key=lambda group: len(rewards[group]))
    v.mine = [(n, s) for n, s in enumerate(v.kept) if s.group == v.group]  # (number in the batch, answer)
    v.followed, v.answer = max(v.mine, key=lambda pair: pair[1].advantage)
    if not v.answer.advantage > 0:
        raise SystemExit(f"no group of step {v.step} has mixed rewards: choose another --step")
    v.prompt = v.tape.argument("sample_and_grade", "prompts")[v.group]
    v.tokenizer = v.run.inputs.tokenizer
    v.names = [f"`{name}`" for name in v.tokenizer.convert_ids_to_tokens(range(len(v.tokenizer)))]
    (v.mb,) = v.tape.argument("forward_backward", "micro_batches")
    numbers_T = np.repeat(v.mb.samples, v.mb.lengths)
    padding = v.mb.tokens.shape[1] - len(numbers_T)
    v.seq_id_T = torch.from_numpy(np.pad(numbers_T, (0, padding), constant_values=-1))
    answer_T = v.mb.mask[0] > 0
    v.places = {}  # {number in the batch: positions of the answer's targets in the row}
    for n in range(len(v.kept)):
        own_T = (v.seq_id_T == n) & answer_T
        v.places[n] = own_T.nonzero()[:, 0].tolist()


def compute_loss(v: SimpleNamespace) -> None:
    """Add each token's loss to `v`. Exits where their sum is not what the step reports."""
    v.logp_T = v.tape.argument("grpo_loss", "logp_T").detach()
    v.entropy_T = v.tape.argument("grpo_loss", "entropy_T").detach()
    old_logp_T = v.logp_T if v.mb.old_logp is None else v.mb.old_logp[0]
    v.ratio_T = (v.logp_T - old_logp_T).exp()
    policy_T, _ = v.tape.result("policy_loss")
    v.policy_T = policy_T.detach()
    v.loss_T = v.policy_T - v.cfg.algo.entropy_coef * v.entropy_T
    v.report = v.tape.result("forward_backward")
    v.loss_sum = (v.loss_T * v.mb.weights[0]).sum().item()
    reported = v.report["loss"]
    if abs(v.loss_sum - reported) > 1e-4:
        raise SystemExit(f"the tokens' losses add up to {v.loss_sum}, the step reports {reported}: mend this tool")


def sampling(v: SimpleNamespace) -> dict:
    """Values of parts 1 and 2."""
    end, pad = v.tokenizer.eos_token_id, v.tokenizer.pad_token_id
    tokens = {"end_token": v.names[end], "end_id": end, "pad_token": v.names[pad], "pad_id": pad}
    sizes = {"small_prompts": SMALL["rollout.prompts_per_step"], "small_group": SMALL["rollout.group_size"]}
    answers = []
    for n, s in v.mine:
        logps = " ".join(f"{logp:.3f}" for logp in s.rollout_logp)
        answers.append([n, s.response_ids.tolist(), f"`{s.text}`", s.finished, logps])
    letters = [v.names[i] for i in v.prompt.ids]
    head = " | ".join(["text", *letters])
    return {
        "step": v.step,
        "steps_before": v.step - 1,
        "row": json.dumps(v.prompt.row),
        "prompt_table": make_table(head, [["ids", *v.prompt.ids]]),
        "group": v.group,
        "answer_table": make_table("answer | ids | text | finished | vLLM's log-prob of each id", answers),
        "max_new_tokens": v.cfg.rollout.max_new_tokens,
        **sizes,
        **tokens,
    }


def grading(v: SimpleNamespace) -> dict:
    """Values of parts 3 and 4."""
    rewards = np.array([s.reward for _, s in v.mine])
    mean, std = rewards.mean(), rewards.std(ddof=1)
    head = "answer | text | should be | reward | r − mean | advantage"
    right = f"`{v.prompt.answer}`"
    graded = [[n, f"`{s.text}`", right, s.reward, s.reward - mean, s.advantage] for n, s in v.mine]
    quotient = f"({v.answer.reward:.4f} − {mean:.4f}) / ({std:.4f} + 0.000001)"
    return {
        "reward_mean": mean,
        "reward_std": std,
        "group_size": len(v.mine),
        "advantage_table": make_table(head, graded),
        "followed": v.followed,
        "formula": f"{quotient} = {v.answer.advantage:.4f}",
    }


def packing(v: SimpleNamespace) -> dict:
    """Values of part 5."""
    mb = v.mb
    places = []
    for n in (v.seq_id_T[0].item(), v.followed):
        places += (v.seq_id_T == n).nonzero()[:, 0].tolist()
    rows = []
    for t in places:
        tokens = [f"{ids[0, t]} {v.names[ids[0, t]]}" for ids in (mb.tokens, mb.targets)]
        whole = [int(field[t]) for field in (mb.position_ids[0], mb.mask[0], v.seq_id_T)]
        learned = [mb.advantages[0, t].item(), int(mb.weights[0, t]), mb.rollout_logp[0, t].item()]
        rows.append([t, *tokens, *whole, *learned])
    head = "place | token | target | position_ids | mask | seq_id | advantages | weights | rollout_logp"
    return {
        "samples": len(v.kept),
        "row_length": mb.tokens.shape[1],
        "width": mb.width,
        "row_table": make_table(head, rows),
        "cu_seqlens": mb.cu_seqlens.tolist(),
    }


def model(v: SimpleNamespace) -> dict:
    """Values of part 6."""
    sampled_T = v.mb.rollout_logp[0]
    gap_T = (v.logp_T - sampled_T).abs() * v.mb.mask[0]
    return {
        "vocabulary": len(v.names),
        "largest_gap": gap_T.max().item(),
    }


def loss(v: SimpleNamespace) -> dict:
    """Values of part 7."""
    columns_T = (v.logp_T, v.ratio_T, v.mb.advantages[0], v.policy_T, v.entropy_T, v.loss_T)
    tokens = []
    for t in v.places[v.followed]:
        numbers = [column_T[t].item() for column_T in columns_T]
        tokens.append([v.names[v.mb.targets[0, t]], *numbers])
    head = f"target | log-prob | ratio | A | L | entropy H | L − {v.cfg.algo.entropy_coef:g} H"
    count = int(v.report["denominator"])
    return {
        "token_table": make_table(head, tokens),
        "loss_sum": v.loss_sum,
        "trained_tokens": count,
        "loss": v.loss_sum / count,
        "reported_loss": v.metrics["loss/total"],
    }


def gradient(v: SimpleNamespace) -> dict:
    """Values of part 8."""
    norm, clip = v.report["grad_norm"], v.cfg.train.clip_grad
    scaled = "so nothing is scaled" if norm <= clip else f"so gradients are scaled by {clip / norm:.4f}"
    first = v.places[v.followed][0]
    moves = [(v.after[name] - weight).abs().max().item() for name, weight in v.before.items()]
    return {
        "token_gradient": v.tape.result("gradient")[first].item(),
        "weights": sum(weight.numel() for weight in v.after.values()),
        "grad_norm": norm,
        "clip_grad": clip,
        "scaled": scaled,
        "lr": v.metrics["lr"],
        "largest_move": max(moves),
    }


def push(v: SimpleNamespace) -> dict:
    """Values of part 9."""
    after_T = torch.zeros_like(v.logp_T)
    after_T[: len(v.mb.index_T)] = v.rescored_F[v.mb.index_T]
    rows = []
    for n, s in v.mine:
        places = v.places[n]
        before = v.logp_T[places].sum()
        after = after_T[places].sum()
        change = (after_T - v.logp_T)[places].sum().exp()
        rows.append([n, f"`{s.text}`", s.advantage, before.item(), after.item(), change.item()])
    head = "answer | text | advantage | log-prob before | after | probability after ÷ before"
    drift_T = (after_T - v.logp_T).abs() * v.mb.mask[0]
    return {
        "tensors": len(v.after),
        "change_table": make_table(head, rows),
        "drift": drift_T.max().item(),
        "next_gap": v.next_metrics["logp_gap/max"],
    }


def make_page(v: SimpleNamespace) -> str:
    """docs/walkthrough.md: the template with the values of a run, its paragraphs filled."""
    choose(v)
    compute_loss(v)
    values = {}
    for part in (sampling, grading, packing, model, loss, gradient, push):
        values |= part(v)
    blocks = []
    for block in TEMPLATE.read_text().format_map(values).rstrip().split("\n\n"):
        kept = block.startswith(("#", "|", "```", "["))
        blocks.append(block if kept else textwrap.fill(block, 138))
    page = "\n\n".join(blocks) + "\n"
    remaining = iter(QUOTES)
    return QUOTE.sub(lambda mark: quote(*next(remaining)), page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=81, help="the step that is shown")
    parser.add_argument("--quotes", action="store_true", help="renew the quotes of the page only, without a run")
    parser.add_argument("--out", type=Path, default=REPO / "docs/walkthrough.md")
    args = parser.parse_args()
    quotes = [quote(*where) for where in QUOTES]  # before the run, which takes a minute
    page = args.out.read_text() if args.quotes else make_page(record(args.step))
    remaining = iter(quotes)
    text = QUOTED.sub(lambda old: next(remaining), page)
    args.out.write_text(text)
    print(f"{args.out}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
