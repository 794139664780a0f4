"""The last stage: what ends an answer. The model's end tokens do, and what rollout.stop and stop_token_ids add."""

from collections.abc import Iterator
from dataclasses import dataclass

import transformers

from config import DataConfig, EvalConfig, RolloutConfig
from grpo.parts.base.hf_folder import read_config
from grpo.parts.base.require import require_data
from grpo.parts.data.tokens import render

MARK = "⟦answer⟧"  # stands for the model's answer, to find what the chat template writes after it


@dataclass(frozen=True)
class Ends:
    """Tokens and texts, each of which ends an answer."""

    tokens: frozenset[int]
    texts: list[str]
    tokenizer: object  # of transformers


def read_ends(path, tokenizer, sampling: RolloutConfig | EvalConfig) -> Ends:
    """The end tokens of tokenizer and model, as vLLM reads them, and the stops of `sampling`."""
    try:
        eos = transformers.GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # there is no generation_config.json
        eos = read_config(path).eos_token_id
    model_ends = eos if isinstance(eos, list) else [eos]
    tokens = {tokenizer.eos_token_id, *model_ends, *sampling.stop_token_ids} - {None}
    return Ends(frozenset(tokens), sampling.stop, tokenizer)


def after_answer(tokenizer, data: DataConfig, reply: str | None = None) -> str:
    """What the chat template writes after an answer: up to its end or, with a user's `reply`, up to the next answer.

    Raises ValueError if the template leaves the answer out, and what the template itself raises.
    """
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    if reply is not None:
        chat.append({"role": "user", "content": reply})
    whole = render(tokenizer, chat, data, add_generation_prompt=reply is not None)
    _, mark, text = whole.partition(MARK)
    require_data(bool(mark), "it leaves an assistant's message out")
    return text


def endless(ends: Ends, data: DataConfig) -> Iterator[str]:
    """A warning of a chat template whose end token ends nothing in vLLM."""
    tokenizer = ends.tokenizer
    if not data.chat_template:
        return

    try:
        text = after_answer(tokenizer, data).lstrip()
    except Exception:  # a template may raise any exception for other messages than it is made for
        return
    first = tokenizer(text, add_special_tokens=False)["input_ids"][:1]
    if first and not ends.tokens.intersection(first) and not any(stop in text for stop in ends.texts):
        yield (
            f"the chat template ends an answer with {tokenizer.decode(first)!r}, token {first[0]}, which is neither an "
            f"end token ({sorted(ends.tokens)}) nor in a stop, so such an answer goes on to rollout.max_new_tokens; "
            f"try rollout.stop_token_ids={first}"
        )
