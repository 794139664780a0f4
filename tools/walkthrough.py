"""Write docs/walkthrough.md: one prompt of the demo from text to gradient, with the numbers of a real run.

    make walkthrough        or, once build/tiny exists:
    torchrun --standalone --nproc_per_node=1 tools/walkthrough.py [--step N]

Trains the demo on one rank. Step N takes few prompts and answers, so that all of it can be printed; one more shows that
its weights have reached vLLM. The functions of train_grpo.py run as they are, what goes in and comes out is written
down. Lines of code are looked up in the files as they are now.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


REPO = Path(__file__).resolve().parent.parent
SMALL = {"rollout.prompts_per_step": 2, "rollout.group_size": 6}  # in the step that is shown

# What the text quotes: name → (file, function, what stands in the first line, number of lines); a statement is whole.
# In the order of the page.
SCRIPT = "train_grpo.py"
QUOTES = {
    "load": ("support/tokens.py", "to_ids", "return tokenizer(", 1),
    "draw": (SCRIPT, "collect", "prompts = dict(", 1),
    "seeds": (SCRIPT, "answer", "seeds = [", 1),
    "generate": (SCRIPT, "answer", "generated = generate(", 1),
    "request": ("rollout.py", "Engine.generate", "params = self.sampling_params(", 1),
    "keep": (SCRIPT, "answer", "texts = run.inputs.tokenizer", 4),
    "reward": ("tools/tiny_reward.py", "digits_in_place", "return", 1),
    "graded": (SCRIPT, "answer", "for sample, outcome in zip(", 4),
    "advantage": (SCRIPT, "group_advantages", "r = rewards_N[members]", 5),
    "spread": (SCRIPT, "give_credit", "credit_F = credit.spread(", 1),
    "shift": (SCRIPT, "flatten", '"tokens": [', 2),
    "mask": (SCRIPT, "flatten", 'rows["mask"] = ', 1),
    "rows": (SCRIPT, "train_step", "micro_batches = to_micro_batches(", 1),
    "bounds": ("support/packing.py", "pack", "cu_seqlens = np.cumsum(", 1),
    "weights": (SCRIPT, "train_step", "batch = replace(batch, weights=", 1),
    "forward": (SCRIPT, "forward_step", "mb = next(micro_batches)", 5),
    "logits": ("megatron_bridge.py", "token_logprobs", "logits, _ = model.output_layer(", 2),
    "gate": (SCRIPT, "train_step", "if number < gates.compared_updates(", 2),
    "old": (SCRIPT, "grpo_loss", "old_logp_T = ", 1),
    "ratio": (SCRIPT, "policy_loss", "ratio_T = log_ratio_T.clamp(", 2),
    "clip": (SCRIPT, "policy_loss", "loss_T = torch.maximum(", 1),
    "entropy": (SCRIPT, "grpo_loss", "if algo.entropy_coef:", 2),
    "sum": (SCRIPT, "grpo_loss", "loss, denominator = ", 1),
    "schedule": (SCRIPT, "run_schedule", "return bridge.get_forward_backward_func()(", 1),
    "step": (SCRIPT, "train_step", 'report["grad_norm"] = ', 1),
    "norm": ("megatron_bridge.py", "optimizer_step", "norm = float(", 3),
    "push": (SCRIPT, "push_weights", "run.engine.wake(", 3),
    "reload": ("rollout.py", "Engine.load_weights", "self.llm.collective_rpc(", 1),
}
QUOTED = re.compile(r"\[([\w/]+\.py):\d+\]\(\S+\), in `([\w.]+)`:\n\n```python\n.*?```", re.DOTALL)
SIMPLE = ast.Assign | ast.Return | ast.Expr


def quote(name: str) -> str:
    """The lines of QUOTES[name] as they are now, under a link to them. Raises LookupError."""
    file, function, start, count = QUOTES[name]
    text = (REPO / file).read_text()
    scope: ast.AST = ast.parse(text)
    for part in function.split("."):
        found = [node for node in ast.walk(scope) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        scope = next((node for node in found if node.name == part), None)
        if scope is None:
            raise LookupError(f"{file} has no {function}: change QUOTES[{name!r}] in tools/walkthrough.py")
    lines = text.splitlines()
    for number in range(scope.lineno, scope.end_lineno + 1):
        if start in lines[number - 1]:
            statements = [node for node in ast.walk(scope) if isinstance(node, SIMPLE) and node.lineno == number]
            end = max([number + count - 1, *(node.end_lineno for node in statements)])
            code = textwrap.dedent("\n".join(lines[number - 1 : end]))
            return f"[{file}:{number}](../{file}#L{number}), in `{function}`:\n\n```python\n{code}\n```"
    raise LookupError(f"{file}, {function}: no line with {start!r}: change QUOTES[{name!r}] in tools/walkthrough.py")


# ---------------------------------------------------------------- the run


class Tape:
    """Writes down the calls of a step: `calls` is {name: [(arguments by name, result)]}."""

    def __init__(self):
        self.calls: dict[str, list[tuple[dict, object]]] = {}

    def watch(self, owner, name: str, before: Callable[[dict], None] = lambda arguments: None) -> None:
        """Write down each call of the function `owner.name`; `before` sees the arguments first."""
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
        return self.calls[name][-1][1]

    def argument(self, name: str, argument: str):
        """An argument of the last call."""
        return self.calls[name][-1][0][argument]


def record(shown: int) -> dict:
    """Run the demo up to the step after `shown`; returns what the text needs, by name."""
    import train_grpo

    tape = Tape()
    seen = {}
    config_at, train_step = train_grpo.config_at, train_grpo.train_step

    def small_step(cfg, step, moving):
        used = config_at(cfg, step, moving)
        return train_grpo.changed(used, SMALL) if step == shown else used

    def keep_gradient(arguments):
        arguments["logp_T"].register_hook(lambda gradient_T: tape.calls.update(gradient=[({}, gradient_T)]))

    def weights(run):
        return {name: weight.clone() for name, weight in train_grpo.bridge.hf_weights(run.model)}

    def watched_step(run, step):
        if step == shown:
            seen.update(run=run, before=weights(run))
        tape.calls = {}
        metrics, samples = train_step(run, step)
        if step == shown:
            seen.update(
                cfg=train_grpo.config_at(run.cfg, step, run.moving),
                metrics=metrics,
                after=weights(run),
                calls=tape.calls,
            )
            seen["rescored_F"] = train_grpo.score(run.model, tape.result("flatten"), seen["cfg"])
        if step == shown + 1:
            seen.update(next_metrics=metrics)
        return metrics, samples

    train_grpo.config_at, train_grpo.train_step = small_step, watched_step
    for name in ("collect", "answer", "flatten", "forward_backward", "policy_loss"):
        tape.watch(train_grpo, name)
    tape.watch(train_grpo, "grpo_loss", before=keep_gradient)
    with tempfile.TemporaryDirectory() as folder:
        code = train_grpo.main([
            "--config", "configs/tiny.yaml", f"output_dir={folder}/out", f"train.steps={shown + 1}",
            "train.save_every=0",
        ])  # fmt: skip
    if code:
        raise SystemExit(code)
    tape.calls = seen.pop("calls")
    return {**seen, "tape": tape, "step": shown}


# ---------------------------------------------------------------- the text


def table(head: str, rows: list[list]) -> str:
    """A table in Markdown; floats with four digits after the point."""
    names = head.split(" | ")
    shown = [[f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *shown])


def choose(seen: dict) -> SimpleNamespace:
    """What all parts of the text show: one group, one answer of it, and the row it is packed in."""
    tape, cfg = seen["tape"], seen["cfg"]
    samples, groups, _, _ = tape.result("collect")
    trained = [s for s in samples if s.group in groups]
    group = max(groups, key=lambda group: len({s.reward for s in trained if s.group == group}))
    mine = [(n, s) for n, s in enumerate(trained) if s.group == group]  # (number in the batch, answer)
    followed, answer = max(mine, key=lambda pair: pair[1].advantage)
    if not answer.advantage > 0:
        raise SystemExit(f"no group of step {seen['step']} has mixed rewards: choose another --step")
    (mb,) = tape.argument("forward_backward", "micro_batches")
    logp_T, entropy_T = (tape.argument("grpo_loss", name).detach() for name in ("logp_T", "entropy_T"))
    policy_T = tape.result("policy_loss")[0].detach()
    old_logp_T = logp_T if mb.old_logp is None else mb.old_logp[0]
    loss_T = policy_T - cfg.algo.entropy_coef * entropy_T
    report = tape.result("forward_backward")
    added = (loss_T * mb.weights[0]).sum().item()
    if abs(added - report["loss"]) > 1e-4:
        raise SystemExit(f"the tokens' losses add up to {added}, the step reports {report['loss']}: mend this tool")
    tokenizer = seen["run"].inputs.tokenizer
    names = [f"`{name}`" for name in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    places = {n: ((mb.seq_id[0] == n) & (mb.mask[0] > 0)).nonzero()[:, 0].tolist() for n in range(len(trained))}
    prompt = tape.argument("answer", "prompts")[group]
    return SimpleNamespace(
        **seen, trained=trained, group=group, prompt=prompt, mine=mine, followed=followed, answer=answer, mb=mb,
        logp_T=logp_T, ratio_T=(logp_T - old_logp_T).exp(), entropy_T=entropy_T, policy_T=policy_T, loss_T=loss_T,
        added=added, report=report, tokenizer=tokenizer, names=names, places=places,
    )  # fmt: skip


def sampling(v: SimpleNamespace) -> str:
    """Parts 1 and 2."""
    ids, small = v.prompt.ids, SMALL
    answers = table(
        "answer | ids | text | finished | vLLM's log-prob of each id",
        [
            [n, s.response_ids.tolist(), f"`{s.text}`", s.finished, " ".join(f"{logp:.3f}" for logp in s.rollout_logp)]
            for n, s in v.mine
        ],
    )
    end, pad = v.tokenizer.eos_token_id, v.tokenizer.pad_token_id
    return f"""# One prompt, from text to gradient

`make walkthrough` wrote this page from a run of the demo (configs/tiny.yaml, one rank on a CPU), so its numbers
and its quotes are those of the code. The model was untrained; after {v.step - 1} steps on this task, reverse
three digits, it gets some of them right. Step {v.step} takes {small["rollout.prompts_per_step"]} prompts ×
{small["rollout.group_size"]} answers instead of 16 × 16, so that all of it can be printed.

## 1. A row becomes a prompt

The row:

```json
{json.dumps(v.prompt.row)}
```

Its text goes through the tokenizer once, when the data are read (`data.chat_template` is false here; with a
chat model the template comes first):

{quote("load")}

| text | {" | ".join(v.names[i] for i in ids)} |
|---|{"---|" * len(ids)}
| ids | {" | ".join(map(str, ids))} |

The data are an endless stream, shuffled anew each epoch by a pure function of the seed. Step {v.step} takes the
next prompts of it; this one is group {v.group}, and keeps this number to the end of the step:

{quote("draw")}

## 2. vLLM samples a group

Each group has a seed of its own, made of the run's seed, the step and the group, so that the same answers come
out on any number of engines:

{quote("seeds")}

{quote("generate")}

which asks vLLM for `n` answers and, with `logprobs=0`, for the log-prob of each id that was sampled:

{quote("request")}

Back come ids and log-probs. The ids are what is trained on; the text is decoded for the reward and never
tokenised again:

{quote("keep")}

{answers}

`finished` is false where an answer was cut off at `rollout.max_new_tokens`, {v.cfg.rollout.max_new_tokens} here.
Special tokens, {v.names[end]} (id {end}) which ends an answer and {v.names[pad]} (id {pad}), are sampled and trained
like any other; the text leaves them out, so four ids may be three digits."""


def grading(v: SimpleNamespace) -> str:
    """Parts 3 and 4."""
    rewards = np.array([s.reward for _, s in v.mine])
    mean, std, r = rewards.mean(), rewards.std(ddof=1), v.answer.reward
    formula = f"({r:.4f} − {mean:.4f}) / ({std:.4f} + 0.000001) = {v.answer.advantage:.4f}"
    graded = table(
        "answer | text | should be | reward | r − mean | advantage",
        [[n, f"`{s.text}`", f"`{v.prompt.answer}`", s.reward, s.reward - mean, s.advantage] for n, s in v.mine],
    )
    return f"""## 3. Grading

While the engine works on other groups, a grading process calls the reward. The demo's is

{quote("reward")}

{quote("graded")}

## 4. Advantages

An advantage says how much better an answer is than its own group: mean {mean:.4f}, std {std:.4f} (ddof 1) of
the {len(v.mine)} rewards.

{quote("advantage")}

{graded}

Answer {v.followed}, which the rest of this page follows: {formula}. A group whose rewards are all equal gets
exactly 0. Every token of an answer has the advantage of the answer, since the demo's reward is one number; where
single tokens have rewards, this line gives each the advantage of its step:

{quote("spread")}"""


def packing(v: SimpleNamespace) -> str:
    """Part 5."""
    mb = v.mb
    ends = mb.cu_seqlens.tolist()
    rows = table(
        "place | token | target | position_ids | mask | seq_id | advantages | weights | rollout_logp",
        [
            [t, f"{mb.tokens[0, t]} {v.names[mb.tokens[0, t]]}", f"{mb.targets[0, t]} {v.names[mb.targets[0, t]]}",
             int(mb.position_ids[0, t]), int(mb.mask[0, t]), int(mb.seq_id[0, t]), mb.advantages[0, t].item(),
             int(mb.weights[0, t]), mb.rollout_logp[0, t].item()]
            for n in (mb.seq_id[0, 0].item(), v.followed) for t in (mb.seq_id[0] == n).nonzero()[:, 0].tolist()
        ],
    )  # fmt: skip
    return f"""## 5. Rows of tokens

A position predicts the next token. So a sample of n tokens has n − 1 positions: `tokens` is the sample without
its last id, `targets` the sample without its first:

{quote("shift")}

The mask is 1 where the target belongs to the answer. That begins at the prompt's last token, whose target is
the answer's first:

{quote("mask")}

The samples of an update are packed into rows, one after another and without padding between them:

{quote("rows")}

All {len(v.trained)} answers of this step fit into one row of {mb.tokens.shape[1]} positions. Here are the first
in the row and answer {v.followed}:

{rows}

`seq_id` is the number of the answer in the batch; longer ones come first in a row. Where sequences begin and
end is in `cu_seqlens`, here {ends}. Attention reads it, so no token sees another sequence:

{quote("bounds")}

`weights` is what a token's loss is multiplied by; with `algo.loss_norm=token_mean` it is the mask:

{quote("weights")}"""


def model(v: SimpleNamespace) -> str:
    """Part 6."""
    mb, gap_T = v.mb, (v.logp_T - v.mb.rollout_logp[0]).abs() * v.mb.mask[0]
    compared = table(
        "target | trainer | vLLM | difference",
        [
            [v.names[mb.targets[0, t]], f"{v.logp_T[t]:.6f}", f"{mb.rollout_logp[0, t]:.6f}", f"{gap_T[t]:.0e}"]
            for t in v.places[v.followed]
        ],
    )
    return f"""## 6. Through Megatron

Megatron's schedule calls `forward_step` for each row, on every pipeline stage:

{quote("forward")}

`token_logprobs` computes logits for the masked-in positions alone, over the {len(v.names)} tokens of the
vocabulary (each tensor-parallel rank has a part of it), divides them by the sampling temperature and takes the
log-prob of the target and the entropy:

{quote("logits")}

The engine has the same weights, so it must have said the same when it sampled. For answer {v.followed}:

{compared}

The largest difference in the whole row is {gap_T.max():.1e}. It is held against a bound before the weights
change (1e-3 in fp32; in bf16 the mean against 0.05, then 4 times that of step 1): kernels, temperature or positions
that differ show here. That the weights are the same is proven when they are pushed.

{quote("gate")}"""


def loss(v: SimpleNamespace) -> str:
    """Part 7."""
    mb, coef = v.mb, v.cfg.algo.entropy_coef
    tokens = table(
        f"target | log-prob | ratio | A | L | entropy H | L − {coef:g} H",
        [
            [v.names[mb.targets[0, t]], v.logp_T[t].item(), v.ratio_T[t].item(), mb.advantages[0, t].item(),
             v.policy_T[t].item(), v.entropy_T[t].item(), v.loss_T[t].item()]
            for t in v.places[v.followed]
        ],
    )  # fmt: skip
    answers = table(
        "answer | group | advantage | tokens | sum of their losses",
        [
            [n, s.group, s.advantage, len(v.places[n]), v.loss_T[v.places[n]].sum().item()]
            for n, s in enumerate(v.trained)
        ],
    )
    count, total = int(v.report["trained"]), v.added
    return f"""## 7. The loss

The ratio of the policy to the one before the step's first update. There is one update a step here, so the
policy has not moved yet, the ratio is exactly 1, and no pass is spent on old log-probs. Its gradient is not 0:
that of exp(x − sg(x)) is that of x.

{quote("old")}

{quote("ratio")}

{quote("clip")}

{quote("entropy")}

{tokens}

With a ratio of 1 nothing is clipped and L = −A. Over all {len(v.trained)} answers:

{answers}

{quote("sum")}

The sum is {total:.4f}, the number of trained tokens {count}, and the loss {total:.4f} / {count} = {
        total / count:.4f}, which `metrics.jsonl` has as `loss/total` ({
        v.metrics["loss/total"]:.4f}). With several rows or
replicas Megatron adds the sums and the counts of all and divides once, so the split does not matter."""


def gradient(v: SimpleNamespace) -> str:
    """Part 8."""
    norm, clip, count = v.report["grad_norm"], v.cfg.train.clip_grad, int(v.report["trained"])
    size = sum(weight.numel() for weight in v.after.values())
    scaled = "so nothing is scaled" if norm <= clip else f"so gradients are scaled by {clip / norm:.4f}"
    step = max((v.after[name] - weight).abs().max().item() for name, weight in v.before.items())
    at = v.places[v.followed][0]
    return f"""## 8. The gradient

The backward pass starts from the sum. At answer {v.followed}'s first token the gradient of the sum by its
log-prob is {v.tape.result("gradient")[at]:.4f}, which is −A: a step against it makes the token likelier. (The
entropy's part flows beside it.) From there on it is plain back-propagation, in Megatron's schedule:

{quote("schedule")}

Megatron adds the gradients of all rows and replicas, divides them by the {count} tokens, and takes one step of
Adam:

{quote("step")}

{quote("norm")}

The norm over all {size:,} weights is {norm:.4f}, its bound {clip:g} (`train.clip_grad`), {scaled}. With a
learning rate of {v.metrics["lr"]:g} no weight moved by more than {step:.1e}."""


def push(v: SimpleNamespace) -> str:
    """Part 9."""
    before, after = v.logp_T, torch.zeros_like(v.logp_T)
    after[: len(v.mb.index_T)] = v.rescored_F[v.mb.index_T]
    moved = table(
        "answer | text | advantage | log-prob before | after | probability after ÷ before",
        [
            [n, f"`{s.text}`", s.advantage, before[v.places[n]].sum().item(), after[v.places[n]].sum().item(),
             (after - before)[v.places[n]].sum().exp().item()]
            for n, s in v.mine
        ],
    )  # fmt: skip
    drift = ((after - before).abs() * v.mb.mask[0]).max()
    return f"""## 9. Push

The new weights go to vLLM as full tensors under their Hugging Face names, {len(v.after)} of them here:

{quote("push")}

{quote("reload")}

What the update did to the answers of group {v.group}, scored by the trainer before and after it:

{moved}

Answers share weights and often their first tokens, the other group, the entropy bonus and Adam's momentum pull as
well, and a step of so few answers is a rough one: so single answers may go against the sign of their advantage.

One token's log-prob moved by up to {drift:.2f}. An engine that had missed the push would still sample from the
old weights; digests of both sides, compared here, would end the run at once (support/push_check.py), and the next step
would find a gap of that order; it found {v.next_metrics["logp_gap/max"]:.0e}. The next step begins at 1."""


def page(seen: dict) -> str:
    """docs/walkthrough.md."""
    v = choose(seen)
    text = "\n\n".join(part(v) for part in (sampling, grading, packing, model, loss, gradient, push))
    blocks = [
        block if block.startswith(("#", "|", "```", "[")) else textwrap.fill(block, 138) for block in text.split("\n\n")
    ]
    return "\n\n".join(blocks) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=81, help="the step that is shown")
    parser.add_argument("--quotes", action="store_true", help="renew the quotes of the page only, without a run")
    parser.add_argument("--out", type=Path, default=REPO / "docs/walkthrough.md")
    args = parser.parse_args()
    quotes = iter([quote(name) for name in QUOTES])  # before the run, which takes a minute
    text = args.out.read_text() if args.quotes else page(record(args.step))
    text = QUOTED.sub(lambda old: next(quotes), text)
    args.out.write_text(text)
    print(f"{args.out}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
