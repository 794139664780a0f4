"""Measure the time and memory that a large data set takes to load: 482,000 rows with long test cases, 1.7 GB.

    python -m tests.large_data build/large                    all rows; --rows makes it smaller

Writes OUT/train.parquet if it does not exist, in the format of Eurus-2-RL-Data (chat messages, about 3 KB of JSON in
reward_model.ground_truth), and a byte-level BPE tokenizer. Then two processes load it in parallel, like two ranks of a
machine, first without a cache and then with it. Each prints a JSON object: seconds, and memory before and after, with
and without memory-mapped files, which ranks share and the kernel reclaims when memory is short.
The text is synthetic; a real tokenizer and real prompts take a different time.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROWS, TESTS_BYTES = 482_000, 3000
LETTERS = random.Random(1)
WORDS = ["".join(LETTERS.choices("abcdefghijklmnopqrstuvwxyz", k=LETTERS.randint(2, 9))) for _ in range(4000)]
KEYS = {"answer_key": "reward_model.ground_truth", "source_key": "data_source", "max_prompt_tokens": 2048}
SYSTEM = "Think about the task step by step, check each step, then write the answer and nothing else after it. "
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_rows(path: Path, rows: int) -> None:
    """Write a parquet file of `rows` rows, in row groups of 1,000 as on the hub."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)
    writer = None
    for start in range(0, rows, 1000):
        block = []
        for i in range(start, min(start + 1000, rows)):
            tests = {
                "inputs": [rng.randbytes(TESTS_BYTES // 4).hex()],
                "outputs": [rng.randbytes(TESTS_BYTES // 4).hex()],
            }
            text = " ".join(rng.choices(WORDS, k=rng.randint(30, 180)))
            block.append({
                "data_source": "codecontests",
                "prompt": [{"role": "system", "content": SYSTEM * 4}, {"role": "user", "content": text}],
                "ability": "code",
                "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
                "extra_info": {"index": i, "split": "train"},
            })  # fmt: skip
        table = pa.Table.from_pylist(block)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the words of the prompts, and save it with a chat template."""
    import transformers

    from tools import make_tiny

    trained = make_tiny.bpe_tokenizer([SYSTEM, " ".join(WORDS)], vocab_size=4096)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def memory_mib() -> dict[str, int]:
    """Return MiB of this process: RssAnon (not backed by files), RssFile (mapped files), VmHWM (peak of both)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(status[name].split()[0]) // 1024 for name in ("RssAnon", "RssFile", "VmHWM")}


def load(out: Path) -> dict:
    """Load the data set like a rank, and return seconds and memory."""
    from config import DataConfig
    from support.data.prompts import fingerprint, load_prompts, load_tokenizer, prompt_batch

    tokenizer = load_tokenizer(str(out / "tokenizer"))
    import datasets  # noqa: F401, before the first reading: its memory is not that of the data

    before = memory_mib()
    start = time.monotonic()
    prompts, dropped = load_prompts(DataConfig(train=str(out / "train.parquet"), **KEYS), tokenizer)
    seconds = time.monotonic() - start
    start = time.monotonic()
    batch = prompt_batch(prompts, 0, 256, seed=0)
    after = memory_mib()
    return {
        "prompts": len(prompts), "dropped": dropped, "seconds": round(seconds, 1),
        "seconds_of_256_prompts": round(time.monotonic() - start, 3), "longest": max(len(p.ids) for p in batch),
        "no_file_mib_before": before["RssAnon"], "no_file_mib": after["RssAnon"], "mapped_mib": after["RssFile"],
        "peak_mib": after["VmHWM"], "fingerprint": fingerprint(prompts),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        print(json.dumps(load(args.out)), flush=True)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "train.parquet").exists():
        start = time.monotonic()
        write_rows(args.out / "part.parquet", args.rows)
        write_tokenizer(args.out / "tokenizer")
        (args.out / "part.parquet").rename(args.out / "train.parquet")
        print(f"made in {time.monotonic() - start:.0f} s", flush=True)
    print(f"{(args.out / 'train.parquet').stat().st_size / 1e9:.2f} GB", flush=True)
    cache = (args.out / "cache").absolute()
    shutil.rmtree(cache, ignore_errors=True)
    for start in ("nothing cached", "second start"):
        print(start, flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.large_data", str(args.out), "--rank"]
        ranks = [subprocess.Popen(command, env={**os.environ, "HF_DATASETS_CACHE": str(cache)}) for _ in range(2)]
        codes = [rank.wait() for rank in ranks]
        assert codes == [0, 0], codes
        print(f"{time.monotonic() - began:.0f} s, imports included", flush=True)


if __name__ == "__main__":
    main()
