"""Large sets are tokenised once a machine: the same prompts as without the cache, mapped by every rank."""

import gc
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import datasets
import pyarrow
import pytest
import transformers

from config import DataConfig
from support.data import token_cache
from support.data.prompts import fingerprint, load_prompts
from tests.conftest import read_rows, write_rows

ROWS = 4_500  # 5 blocks, the last one half full


@pytest.fixture(scope="module")
def large(tiny, tmp_path_factory) -> Path:
    """A folder with a tokenizer and rows of chat messages, a few of them too long, in two files."""
    folder = tmp_path_factory.mktemp("large")
    rng = random.Random(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = "{% for m in messages %}+{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "tokenizer")
    rows = [
        {
            "prompt": [{"role": "user", "content": "".join(rng.choices("0123456789", k=rng.randint(1, 100)))}],
            "reward_model": {"ground_truth": f"{i}é"},
            "data_source": rng.choice(["code", "math"]),
        }
        for i in range(ROWS)
    ]
    write_rows(folder / "a.jsonl", rows[:2_345])
    write_rows(folder / "b.jsonl", rows[2_345:])
    write_rows(folder / "few.jsonl", rows[:1500])
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Where tokens are cached; every set of at least 100 kB is."""
    gc.collect()  # process groups of other tests: a forked process that frees one waits for a thread that it lacks
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(token_cache, "LARGE_BYTES", 100_000)
    return tmp_path / "hf/train_grpo"


def is_cached(prompts) -> bool:
    """Whether the token ids are mapped from the cache."""
    return isinstance(prompts.ids, pyarrow.ChunkedArray)


def cached_files(cache: Path) -> set[tuple]:
    """Each file of the cache, with what changes when it is written again."""
    return {(file.name, file.stat().st_ino, file.stat().st_mtime_ns) for file in cache.glob("*.arrow")}


def load(folder: Path, *names: str, **options):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    keys = {"answer_key": "reward_model.ground_truth", "source_key": "data_source", "max_prompt_tokens": 90}
    files = [str(folder / name) for name in names or ("a.jsonl", "b.jsonl")]
    return load_prompts(DataConfig(train=files, **{**keys, **options}), tokenizer)


def test_prompts_are_the_same_with_and_without_the_cache(large, cache, monkeypatch, capsys):
    cached = load(large, "b.jsonl", "few.jsonl")
    assert is_cached(cached) and "tokenised once for this machine" in capsys.readouterr().out
    monkeypatch.setattr(token_cache, "LARGE_BYTES", 10**9)
    plain = load(large, "b.jsonl", "few.jsonl")
    assert not is_cached(plain) and isinstance(plain.table, list)
    assert len(cached) == len(plain) == ROWS - 2_345 + 1500 - plain.dropped and cached.dropped == plain.dropped > 100
    assert fingerprint(cached) == fingerprint(plain)
    for i in [0, 1, len(plain) // 2, len(plain) - 1, -1, *random.Random(1).sample(range(len(plain)), 200)]:
        assert cached[i] == plain[i]
    with pytest.raises(IndexError):
        cached[len(cached)]

    monkeypatch.setattr(token_cache, "LARGE_BYTES", 100_000)
    files = cached_files(cache)
    again = load(large, "b.jsonl", "few.jsonl")  # the second start only maps
    assert fingerprint(again) == fingerprint(plain) and is_cached(again) and cached_files(cache) == files


def test_what_changes_tokens_has_a_cache_of_its_own_and_a_cut_file_is_told(large, cache):
    def built(**options) -> bool:
        before = cached_files(cache)
        prompts = load(large, "few.jsonl", **options)
        assert len(prompts) > 500 and is_cached(prompts) and len(prompts[len(prompts) - 1].ids) > 1
        return cached_files(cache) != before

    assert built() and not built()
    for options in ({"max_prompt_tokens": 70}, {"system_prompt": "7"}, {"answer_key": "data_source"}):
        assert built(**options) and not built(**options)
    os.utime(large / "few.jsonl", ns=(time.time_ns(), time.time_ns()))
    assert built() and not built()
    newest = max(cache.glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns)
    for content in (newest.read_bytes()[:-1000], bytes(1000), b""):
        newest.write_bytes(content)
        with pytest.raises(ValueError, match=rf"data\.train: .* delete {newest.name[:32]}\*"):
            load(large, "few.jsonl")
    newest.unlink()
    assert built() and not built()
    assert {path.suffix for path in cache.iterdir()} == {".arrow", ".lock"}  # nothing half made is left


def load_as_a_rank(folder: Path) -> tuple[str, int, str]:
    """In a process of its own: the type of the token ids, the rows, the fingerprint."""
    token_cache.LARGE_BYTES = 100_000
    prompts = load(folder)
    return type(prompts.ids).__name__, len(prompts) + prompts.dropped, fingerprint(prompts)


@pytest.mark.slow
def test_two_ranks_at_once_build_once(large, cache, monkeypatch, capfd):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache.parent))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as ranks:
        first, second = ranks.map(load_as_a_rank, [large, large])
    assert first == second and first[:2] == ("ChunkedArray", ROWS)
    assert capfd.readouterr().out.count("tokenised once") == 1


def test_a_run_without_a_place_for_the_cache_is_refused(large, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=r"^data\.train: its tokens cannot be cached in .* set HF_DATASETS_CACHE"):
        load(large, "few.jsonl")


def test_mistakes_are_named_as_ever(large, cache, tmp_path):
    """The first invalid row, by its own file."""
    rows = read_rows(large / "few.jsonl")
    rows[321]["reward_model"]["ground_truth"] = None
    rows[1000]["prompt"] = []
    write_rows(tmp_path / "bad.jsonl", rows)
    for _ in range(2):  # what is wrong is cached too
        with pytest.raises(ValueError, match=r"^data\.train: .*bad\.jsonl, row 322: 'reward_model.ground_truth' is nu"):
            load(large, "few.jsonl", str(tmp_path / "bad.jsonl"))
        files = cached_files(cache)
    assert files and cached_files(cache) == files
    with pytest.raises(ValueError, match=r"^data\.max_prompt_tokens=1: all 1500 prompts of .* the shortest has \d+"):
        load(large, "few.jsonl", max_prompt_tokens=1)
