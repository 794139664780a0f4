"""Make the tiny model, tokenizer and data of the demo. Downloads nothing.

    python tools/make_tiny.py build/tiny                             the reversal task of `make demo`
    python tools/make_tiny.py build/gsm8k --text train.jsonl         a byte-level BPE tokenizer trained on its questions

Writes OUT/model (config.json, random weights, tokenizer) and, for the reversal task, OUT/train.jsonl with rows like
{"prompt": "3142>", "answer": "2413", "source": "reverse"}. The model is untrained: all it learns is from the reward.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LINEAR = {  # attention, of heads whose first quarter turns, in every other layer
    "full_attention_interval": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}  # fmt: skip
# model type → entries of its config beside the sizes common to all
ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 160},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 160},
}


def char_tokenizer(alphabet: str):
    """A tokenizer with one token per character: the prompt "12>" is three tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Fuse

    vocab = {token: i for i, token in enumerate(["<eos>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    return tokenizer


def bpe_tokenizer(texts: list[str], vocab_size: int):
    """A byte-level BPE tokenizer trained on `texts`, as GPT-2 and Qwen have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_model(
    folder: Path, tokenizer, arch="qwen2", tied=True, hidden=128, layers=2, kv_heads=2, seed=0, std=0.06, ffn=8, **extra
) -> int:
    """Write an untrained model with its tokenizer to `folder` and return its number of parameters.

    `extra` goes into config.json. `std` is the standard deviation of the initial weights. With 0.06 attention is sharp
    enough for RL to learn from an untrained model; with the usual 0.02 it is not.
    """
    import torch
    import transformers

    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<pad>"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = transformers.AutoConfig.for_model(
        arch, vocab_size=len(wrapped), hidden_size=hidden, intermediate_size=ffn * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=kv_heads, head_dim=32, max_position_embeddings=2048,
        tie_word_embeddings=tied, initializer_range=std, eos_token_id=wrapped.eos_token_id,
        pad_token_id=None, bos_token_id=None, **ARCHITECTURES[arch] | extra,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def reversal_rows(digits: int, rows: int, seed) -> list[dict]:
    strings = ["".join(d) for d in itertools.product("0123456789", repeat=digits)]
    random.Random(seed).shuffle(strings)
    return [{"prompt": f"{s}>", "answer": s[::-1], "source": "reverse"} for s in strings[:rows]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, help="jsonl whose `question` column trains a BPE tokenizer")
    args = parser.parse_args()

    if args.text:
        tokenizer = bpe_tokenizer([json.loads(line)["question"] for line in args.text.open()], vocab_size=1024)
    else:
        tokenizer = char_tokenizer("0123456789>+-=")

    args.out.mkdir(parents=True, exist_ok=True)
    size = save_model(args.out / "model", tokenizer)
    print(f"{args.out}/model: untrained Qwen2, {size / 1e6:.2f} M parameters")

    if not args.text:
        rows = reversal_rows(digits=3, rows=1000, seed=0)
        (args.out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.out}/train.jsonl: {len(rows)} rows like {json.dumps(rows[0])}")


if __name__ == "__main__":
    main()
