"""Try the rewards on the data: a row's own reference, given as an answer, must get 1, and another row's must not.

This is done with rewards that compare an answer with its reference. Of others, those with a `check_row` see the rows.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from config import UserError
from grpo.parts.data.prompts import Prompt
from grpo.parts.data.tables import TEMPLATE_KEYS
from grpo.parts.data.tokens import lookup
from grpo.step import named_rewards
from grpo.step.grading import GradingPool, Outcome
from reward import COMPARING

LOOKED_AT = 1000  # rows of a set, evenly spaced, among which the rows of each source are found
TRIED = 100  # rows of a source; fewer if there are more than three
SECONDS = 2.0  # for an answer

# Forms that a prompt asks for: what its text contains, and an answer of the form.
FORMS = {"\\boxed": "\\boxed{{{}}}", "####": "#### {}", "<answer>": "<answer>{}</answer>"}


@dataclass
class Attempt:
    """A reference as an answer to a row."""

    prompt: Prompt
    text: str
    kind: str  # own, asked (own, in the form that the prompt asks for), other


def try_rewards(cfg, prompts) -> Iterator[str]:
    """Yield lines to print about the rewards of `prompts`. Raises UserError if none of a source's references passes."""
    found = rows_of_sources(prompts)
    unread = unread_columns(found, cfg)
    if unread:
        yield f"         the columns {', '.join(unread)} are read by no key; a reward of your own gets them in its row"

    attempts = {}  # (source, reward) → attempts
    for source, rows in found.items():
        spec = cfg.reward.by_source.get(source, cfg.reward.default)
        for name in named_rewards.weights_of(spec):
            function = named_rewards.find(name, cfg.reward)
            if function in COMPARING:
                attempts[source, name] = list(attempts_of(function, rows, cfg.data))
            elif hasattr(function, "check_row"):
                check_rows(function, name, source, rows)

    for (source, name), outcomes in grade(attempts, cfg.reward).items():
        yield from report(outcomes, name, source, cfg.data.answer_key)


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


def unread_columns(found: dict[str, list[Prompt]], cfg) -> list[str]:
    """Columns of the rows that no key of the section `data`, nor an option of a reward, names."""
    data = cfg.data
    read = {data.prompt_key, data.answer_key, data.source_key, data.hint_key, *TEMPLATE_KEYS}
    for options in cfg.reward.options.values():
        read.update(map(str, options.values()))
    heads = {str(key).partition(".")[0] for key in read} | read
    columns = (column for rows in found.values() for prompt in rows for column in prompt.row)
    return [str(column) for column in dict.fromkeys(columns) if column not in heads]


def check_rows(function: Callable, name, source, rows: list[Prompt]):
    """Let a reward look at rows before the start. Raises UserError for one that it cannot grade."""
    for prompt in rows:
        answers = named_rewards.answers_for(function, prompt.answer)
        try:
            function.check_row(answers[0], prompt.row)
        except ValueError as error:
            raise UserError(f"the reward {name} cannot grade rows of the source {source!r}: {error}") from None


def attempts_of(function: Callable, rows: list[Prompt], data) -> Iterator[Attempt]:
    """The attempts with each row: its own reference, twice if its prompt asks for a form, and the next other one."""
    references = [reference_of(function, prompt.answer) for prompt in rows]
    for number, (prompt, reference) in enumerate(zip(rows, references, strict=True)):
        own = named_rewards.as_answer(function, reference)
        yield Attempt(prompt, own, "own")

        question = f"{data.system_prompt} {lookup(prompt.row, data.prompt_key)}"
        asked = [form for mark, form in FORMS.items() if mark in question and mark not in own]
        if asked:
            bare = named_rewards.bare_reference(function, reference)
            yield Attempt(prompt, asked[0].format(bare), "asked")

        for other in references[number + 1 :] + references[:number]:
            if reference.strip() != other.strip():
                yield Attempt(prompt, named_rewards.as_answer(function, other), "other")
                break


def reference_of(function: Callable, answer: named_rewards.Answer) -> str:
    """The first reference that an answer's row gives. If there is none, grading will say why."""
    try:
        return named_rewards.answers_for(function, answer)[0]
    except ValueError:
        return str(answer)


def grade(attempts: dict[tuple, list[Attempt]], cfg) -> dict[tuple, list[tuple[Attempt, Outcome]]]:
    """Grade attempts as a step does, in processes that can be killed, each by one reward alone."""
    names = {name: name for _, name in attempts}
    settings = {"by_source": names, "workers": min(2, cfg.workers), "timeout_s": min(SECONDS, cfg.timeout_s)}
    pool = GradingPool(cfg.model_copy(update=settings))
    for (_, name), own in attempts.items():
        for attempt in own:
            pool.submit(name, attempt.text, attempt.prompt.answer, attempt.prompt.row)
    outcomes = iter(pool.collect())
    pool.close()
    return {key: [(attempt, next(outcomes)) for attempt in own] for key, own in attempts.items()}


def report(outcomes: list[tuple[Attempt, Outcome]], name, source, answer_key) -> Iterator[str]:
    """Yield what a reward says of references of a source, with three examples of each fault. Raises UserError."""
    passed, failed = defaultdict(list), defaultdict(list)  # kind → examples
    for attempt, outcome in outcomes:
        right = math.isclose(sum(outcome.parts.values()), 1.0)
        if right:
            passed[attempt.kind].append(f"{attempt.text!r} to {attempt.prompt.answer!r:.60}")
        else:
            why = outcome.error or outcome.status.replace("ok", f"reward {sum(outcome.parts.values()):g}")
            failed[attempt.kind].append(f"{attempt.text!r} to {attempt.prompt.answer!r:.60} ({why})")

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
