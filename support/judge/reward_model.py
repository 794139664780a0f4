"""A sequence-classification model as a reward: its scores in batches. `reward.model` says what the options mean."""

import functools
import os
from pathlib import Path

CONVERT = (
    "convert it once, from weights you trust: python -c \"import transformers as t; p = '{path}'; "
    "t.AutoModelForSequenceClassification.from_pretrained(p, use_safetensors=False).save_pretrained(p + '-safe'); "
    "t.AutoTokenizer.from_pretrained(p).save_pretrained(p + '-safe')\""
)


def check_folder(key: str, path: str) -> None:
    """Raises ValueError for a folder, given at `key` of the configuration, without safetensors."""
    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        what = "only pickled weights (.bin), which may run code" if any(folder.glob("*.bin")) else "no weights"
        raise ValueError(f"{key}={path} holds {what}, and no safetensors; {CONVERT.format(path=path)}")


def check_type(key: str, path: str) -> None:
    """Raises ValueError unless `path`, given at `key`, is a model that scores: a folder, or a name on the hub.

    Of a name on the hub only config.json is read; its weights are checked as they are loaded.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}={path}: {' '.join(str(error).split())[:300]}") from None
    names = config.architectures or ["no architecture"]
    if not names[0].endswith("ForSequenceClassification"):
        raise ValueError(
            f"{key}={path} is a {names[0]}; a reward model is a ...ForSequenceClassification, whose first logit is the "
            "reward. Any other would get a random head"
        )


def scores(
    answers: list[tuple[str, dict]],
    path: str,
    device: str,
    dtype: str,
    batch_size: int,
    max_tokens: int,
    prompt_key: str,
    pairs: bool,
) -> list[float]:
    """`reward.model` of many (response, row), in batches: the first logit of each."""
    import torch

    scorer, tokenizer = load(path, device, dtype)
    questions, texts = [], []
    for text, row in answers:
        prompt = row[prompt_key]
        if pairs or not tokenizer.chat_template:
            questions.append(prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt))
            texts.append(text if pairs else questions[-1] + text)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            messages.append({"role": "assistant", "content": text})
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
    logits = []
    for start in range(0, len(texts), batch_size):
        part = slice(start, start + batch_size)
        columns = [questions[part], texts[part]] if pairs else [texts[part]]
        batch = tokenizer(
            *columns,
            padding=True,
            truncation=True,
            max_length=max_tokens,
            add_special_tokens=pairs or not tokenizer.chat_template,  # a template contains its own
            return_tensors="pt",
        ).to(scorer.device)
        with torch.inference_mode():
            logits += scorer(**batch).logits[:, 0].float().tolist()
    return logits


@functools.cache  # of each model: a run may use several
def load(path: str, device: str, dtype: str) -> tuple:
    """The reward model, in evaluation mode, and its tokenizer. Raises ValueError where it has no safetensors."""
    import torch
    import transformers

    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, truncation_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    try:
        scorer = transformers.AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, dtype), use_safetensors=True
        )
    except OSError as error:
        hint = f"; {CONVERT.format(path=path)}" if "safetensors" in str(error) else ""
        raise ValueError(f"the reward model {path}: {error}{hint}") from error
    scorer.config.pad_token_id = tokenizer.pad_token_id
    return scorer.to(device).eval(), tokenizer
