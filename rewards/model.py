"""A sequence-classification model as a reward: reward.functions.model=rewards/model.py:Model.

Each grading process loads it; set reward.memory_gb=0, since a model needs more address space than a function.
"""

import functools
import os
from pathlib import Path

from grpo.parts.data.tokens import check_ids

CONVERT = (
    "convert it once, from weights you trust: python -c \"import transformers as t; p = '{path}'; "
    "t.AutoModelForSequenceClassification.from_pretrained(p, use_safetensors=False).save_pretrained(p + '-safe'); "
    "t.AutoTokenizer.from_pretrained(p).save_pretrained(p + '-safe')\""
)


class Model:
    """The score, a model's first logit, of the response to row[prompt_key], which is a text or messages.

    With `device` cuda it shares the trainer's GPU. It reads the last `max_tokens` tokens of a longer conversation. With
    `pairs` the tokenizer gets question and answer as two texts, as BERT-like models need them.
    """

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str = "float32",
        max_tokens: int = 4096,
        prompt_key: str = "prompt",
        pairs: bool = False,
    ):
        self.scorer, self.tokenizer = load(path, device, dtype)
        self.max_tokens = max_tokens
        self.prompt_key = prompt_key
        self.pairs = pairs

    @staticmethod
    def check(path: str, **_) -> None:
        """Check before the start that `path` is a model that scores, with safetensors. Raises ValueError.

        Only config.json is read of a name on the hub. Its weights are checked when they are loaded.
        """
        import transformers

        folder = Path(path)
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            raise ValueError(
                f"path={path} has no safetensors. Pickled weights (.bin) may run code; {CONVERT.format(path=path)}"
            )
        try:
            config = transformers.AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"path={path}: {' '.join(str(error).split())[:300]}") from None
        names = config.architectures or ["no architecture"]
        if not names[0].endswith("ForSequenceClassification"):
            raise ValueError(
                f"path={path} is a {names[0]}; a reward model is a ...ForSequenceClassification, whose first logit is "
                "the reward. Any other model would get a random head"
            )

    def __call__(self, text: str, answer: str, row: dict) -> float:
        import torch

        prompt = row[self.prompt_key]
        templated = False
        if self.pairs:
            texts = [plain(prompt), text]
        elif self.tokenizer.chat_template:
            templated = True
            texts = [self.tokenizer.apply_chat_template(chat(text, prompt), tokenize=False)]
        else:
            texts = [plain(prompt) + text]

        tokens = self.tokenizer(
            *texts,
            truncation=True,
            max_length=self.max_tokens,
            add_special_tokens=not templated,  # a template contains its own
            return_tensors="pt",
        )
        check_ids(
            "the text to score",
            tokens["input_ids"][0].tolist(),
            self.tokenizer,
            self.scorer.get_input_embeddings().num_embeddings,
            "the reward model",
        )

        with torch.inference_mode():
            return self.scorer(**tokens.to(self.scorer.device)).logits[0, 0].item()


def plain(prompt: str | list[dict]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def chat(text: str, prompt: str | list[dict]) -> list[dict]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*messages, {"role": "assistant", "content": text}]


@functools.cache  # several names may have one model
def load(path: str, device: str, dtype: str) -> tuple:
    """The reward model, in evaluation mode, and its tokenizer. Raises OSError if it has no safetensors."""
    import torch
    import transformers

    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"

    tokenizer = transformers.AutoTokenizer.from_pretrained(path, truncation_side="left")
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=getattr(torch, dtype), use_safetensors=True
    )

    return scorer.to(device).eval(), tokenizer
