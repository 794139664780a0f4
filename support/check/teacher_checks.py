"""Checks of the teacher before the start: it fits on this layout, and knows the tokens of the model in training."""

import transformers

from config import Config
from support.base import hf_folder
from support.check import checks
from support.data.prompts import load_tokenizer
from support.step.teacher import another


def check_shape(cfg: Config) -> None:
    """See, from its config.json alone, that the teacher can be built on this layout. Raises ValueError naming a key."""
    path = another(cfg)
    if path is None:
        return
    checks.check_model(cfg, path, rollout_tp=1, key="algo.teacher")
    rows, needed = (transformers.AutoConfig.from_pretrained(name).vocab_size for name in (path, cfg.model.path))
    if rows < needed:
        raise ValueError(
            f"algo.teacher={path}: its vocabulary has {rows} rows, that of model.path={cfg.model.path} {needed}; an id "
            "beyond them could be sampled, so it must have as many at least"
        )


def check_tokens(cfg: Config, tokenizer, weights: bool) -> None:
    """See that the teacher knows the `tokenizer`'s tokens by the same ids; with `weights` look at its files as well.

    Raises ValueError naming the key.
    """
    path = another(cfg)
    if path is None:
        return
    if weights:
        checks.check_weights(hf_folder.local_folder(path), key="algo.teacher")
    try:
        known = load_tokenizer(path).get_vocab()
    except ValueError as error:
        raise ValueError(str(error).replace("model.path=", "algo.teacher=")) from None
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != number:
            raise ValueError(
                f"algo.teacher={path}: its tokenizer is another one: token {number} of model.path={cfg.model.path} is "
                f"{token!r}, which the teacher has as {known.get(token, 'none of its tokens')}; it scores the very ids "
                "that were sampled, so it has to know all tokens of the model by the same ids"
            )
