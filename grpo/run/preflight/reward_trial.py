"""Try the rewards on the data: a row's own reference, given as an answer, must get 1, and another row's must not.

This is done with rewards that compare an answer with its reference. Of others, those with a `check_row` see the rows.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import numpy as np

from config import UserError
from grpo.parts.data.prompts import Prompt
from grpo.parts.data.tokens import lookup
from grpo.step import named_rewards
from grpo.step.grading import GradingPool
from reward import COMPARING

LOOKED_AT = 1000  # rows of a set, evenly spaced, among which the rows of each source are found
TRIED = 100  # rows of a source; fewer if there are more than three
SECONDS = 2.0  # for an answer

# Forms that a prompt asks for: what its text contains, and an answer of the form.
FORMS = {"\\boxed": "\\boxed{{{}}}", "####": "#### {}", "<answer>": "<answer>{}</answer>"}


def try_rewards(cfg, prompts) -> Iterator[str]:
    """Yield lines to print about the rewards of `prompts`. Raises UserError if none of a source's references passes."""
    found = rows_of_sources(prompts)
    specs = {source: cfg.reward.by_source.get(source, cfg.reward.default) for source in found}
    pairs = [(source, name) for source, spec in specs.items() for name in named_rewards.weights_of(spec)]

    # Each reward by itself, in processes that can be killed.
    own = {name: name for _, name in pairs}
    limits = {"workers": min(2, cfg.reward.workers), "timeout_s": min(SECONDS, cfg.reward.timeout_s)}
    with closing(GradingPool(cfg.reward.model_copy(update={"by_source": own, **limits}))) as pool:
        for source, name in pairs:
            function = named_rewards.find(name, cfg.reward)
            if function in COMPARING:
                outcomes = grade(pool, name, attempts_of(function, found[source], cfg.data))
                yield from report(outcomes, name, source, cfg.data.answer_key)
            elif hasattr(function, "check_row"):
                check_rows(function, name, source, found[source])


def rows_of_sources(prompts) -> dict[str, list[Prompt]]:
    """{source: rows of it}, evenly spaced in each set of a mixture."""
    found = defaultdict(list)
    for each in getattr(prompts, "sets", [prompts]):
        for number in spread(len(each), LOOKED_AT):
            prompt = each[number]
            found[prompt.source].append(prompt)

    most = min(TRIED, math.ceil(3 * TRIED / len(found)))
    return {source: [rows[i] for i in spread(len(rows), most)] for source, rows in found.items()}


def spread(count, most) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spaced."""
    return np.linspace(0, count - 1, min(count, most), dtype=int).tolist()


def check_rows(function: Callable, name, source, rows: list[Prompt]):
    """Let a reward look at rows before the start. Raises UserError for one that it cannot grade."""
    for prompt in rows:
        answers = named_rewards.answers_for(function, prompt.answer)
        try:
            function.check_row(answers[0], prompt.row)
        except ValueError as error:
            raise UserError(f"the reward {name} cannot grade rows of the source {source!r}: {error}") from None


def attempts_of(function: Callable, rows: list[Prompt], data) -> Iterator[tuple]:
    """(kind, row, answer) of the attempts with each row: its "own" reference, the same in a form that its prompt
    "asked" for, and the next "other" one.
    """
    references = [reference_of(function, prompt.answer) for prompt in rows]
    for number, (prompt, reference) in enumerate(zip(rows, references, strict=True)):
        own = named_rewards.as_answer(function, reference)
        yield "own", prompt, own

        question = f"{data.system_prompt} {lookup(prompt.row, data.prompt_key)}"
        asked = [form for mark, form in FORMS.items() if mark in question and mark not in own]
        if asked:
            bare = named_rewards.bare_reference(function, reference)
            yield "asked", prompt, asked[0].format(bare)

        for other in references[number + 1 :] + references[:number]:
            if reference.strip() != other.strip():
                yield "other", prompt, named_rewards.as_answer(function, other)
                break


def reference_of(function: Callable, answer: named_rewards.Answer) -> str:
    """The first reference that an answer's row gives. If there is none, grading will say why."""
    try:
        return named_rewards.answers_for(function, answer)[0]
    except ValueError:
        return str(answer)


def grade(pool: GradingPool, name, attempts: Iterable[tuple]) -> list[tuple]:
    """(kind, words on the attempt, its Outcome) of attempts, by one reward, as a step grades answers."""
    words = []
    for kind, prompt, text in attempts:
        pool.submit(name, text, prompt.answer, prompt.row)
        words.append((kind, f"{text!r} to {prompt.answer!r:.60}"))
    return [(*said, outcome) for said, outcome in zip(words, pool.collect(), strict=True)]


def report(outcomes: list[tuple], name, source, answer_key) -> Iterator[str]:
    """Yield what a reward says of references of a source, with three examples of each fault. Raises UserError."""
    passed, failed = defaultdict(list), defaultdict(list)  # kind → examples
    for kind, words, outcome in outcomes:
        reward = sum(outcome.parts.values())
        if math.isclose(reward, 1.0):
            passed[kind].append(words)
        else:
            why = outcome.error or outcome.status.replace("ok", f"reward {reward:g}")
            failed[kind].append(f"{words} ({why})")

    def examples(found: list[str]) -> str:
        return ", ".join(found[:3])

    where = f"of the source {source!r} (data.answer_key={answer_key})"
    rows = len(passed["own"]) + len(failed["own"])
    if not passed["own"] and not passed["asked"]:
        raise UserError(
            f"the reward {name} gives 1 to none of {rows} references {where}, each given as the answer to its own row: "
            f"{examples(failed['own'])}. Choose another reward (reward.default, reward.by_source), or another column"
        )
    if failed["own"]:
        yield (
            f"warning: the reward {name} does not give 1 to {len(failed['own'])} of {rows} references {where}, each "
            f"given as the answer to its own row: {examples(failed['own'])}"
        )
    if failed["asked"] and not passed["asked"]:
        yield (
            f"warning: the prompts ask for answers in a form that the reward {name} does not read: "
            f"{examples(failed['asked'])} {where}"
        )
    confused = len(passed["other"]) > rows / 20  # fewer may be two ways to write one value
    if confused:
        yield (
            f"warning: the reward {name} gives 1 to {len(passed['other'])} of {rows} references {where}, each given "
            f"as the answer to another row: {examples(passed['other'])}"
        )
    if not (failed["own"] or failed["asked"] or confused):
        others = len(passed["other"]) or "none"
        yield f"reward:  {name} gives 1 to each of {rows} references of the source {source}, to {others} of another row"
