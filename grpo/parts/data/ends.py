"""What ends an answer, for the start and the checks: the model's end tokens, and what rollout.stop* add in vLLM."""

from collections.abc import Iterator
from dataclasses import dataclass

import transformers

from config import DataConfig, EvalConfig, RolloutConfig
from grpo.parts.base.hf_folder import read_config
from grpo.parts.base.require import require_data
from grpo.parts.data.tokens import adds_end, render

MARK = "⟦answer⟧"  # stands for the model's answer, to find what the chat template writes after it


@dataclass(frozen=True)
class Ends:
    """Tokens and texts, each of which ends an answer."""

    tokens: frozenset[int]
    texts: list[str]
    tokenizer: object  # of transformers


def read_ends(path: str, tokenizer, sampling: RolloutConfig | EvalConfig) -> Ends:
    """End tokens of tokenizer and model, as vLLM reads them, and the stops; ValueError for one without a row."""
    config = read_config(path)
    ids = sampling.stop_token_ids
    require_data(
        max(ids, default=0) < config.vocab_size,
        f"rollout or eval.stop_token_ids={ids}: legal are the tokens 0 to {config.vocab_size - 1} of model.path={path}",
    )
    try:
        found = transformers.GenerationConfig.from_pretrained(path)
    except OSError:  # there is no generation_config.json
        found = config
    eos = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    return Ends(frozenset({tokenizer.eos_token_id, *eos, *ids} - {None}), sampling.stop, tokenizer)


def after_answer(tokenizer, data: DataConfig, reply: str | None = None) -> str:
    """What the chat template writes after an answer: up to its end or, with a user's `reply`, up to the next answer.

    Raises ValueError where the template leaves the answer out, and what templates raise.
    """
    said = (("user", "?"), ("assistant", MARK), ("user", reply))
    chat = [{"role": role, "content": content} for role, content in said if content is not None]
    whole = render(tokenizer, chat, data, add_generation_prompt=reply is not None)
    _, found, text = whole.partition(MARK)
    require_data(bool(found), "it leaves an assistant's message out")
    return text


def endless(ends: Ends, data: DataConfig) -> Iterator[str]:
    """Warnings of an end token that the tokenizer adds, and of one of the chat template that ends none in vLLM."""
    if adds_end(data, ends.tokenizer):
        yield f"the tokenizer ends every text with {ends.tokenizer.eos_token!r}: prompts go without it"
    try:
        text = after_answer(ends.tokenizer, data).lstrip() if data.chat_template else ""
    except Exception:  # a template that takes other messages than these fails as code does, with any exception
        return
    first = ends.tokenizer(text, add_special_tokens=False)["input_ids"][:1]
    if first and not ends.tokens.intersection(first) and not any(stop in text for stop in ends.texts):
        yield (
            f"the chat template ends an answer with {ends.tokenizer.decode(first)!r}, token {first[0]}, which is "
            f"neither an end token ({sorted(ends.tokens)}) nor in a stop: an answer that the model ends so goes on to "
            f"rollout.max_new_tokens; try rollout.stop_token_ids={first}"
        )
