"""A sequence-classification model as a reward: its scores in batches. `reward.model` says what the options mean."""

import functools
import os


def scores(
    answers: list[tuple[str, dict]],
    path: str,
    device: str,
    dtype: str,
    batch_size: int,
    max_tokens: int,
    prompt_key: str,
) -> list[float]:
    """`reward.model` of many (response, row), in batches: the first logit of each."""
    import torch

    scorer, tokenizer = load(path, device, dtype)
    texts = []
    for text, row in answers:
        prompt = row[prompt_key]
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            messages.append({"role": "assistant", "content": text})
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
        else:
            texts.append((prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)) + text)
    logits = []
    for start in range(0, len(texts), batch_size):
        batch = tokenizer(
            texts[start : start + batch_size],
            padding=True,
            truncation=True,
            max_length=max_tokens,
            add_special_tokens=not tokenizer.chat_template,  # a template writes its own
            return_tensors="pt",
        ).to(scorer.device)
        with torch.inference_mode():
            logits += scorer(**batch).logits[:, 0].float().tolist()
    return logits


@functools.lru_cache(maxsize=1)
def load(path: str, device: str, dtype: str) -> tuple:
    """The reward model, in evaluation mode, and its tokenizer."""
    import torch
    import transformers

    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, truncation_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=getattr(torch, dtype), use_safetensors=True
    )
    scorer.config.pad_token_id = tokenizer.pad_token_id
    return scorer.to(device).eval(), tokenizer
