"""The oracle reads rows as the trainer does, though it shares no code with it."""

import json
from decimal import Decimal

import make_tiny
import pyarrow
import pyarrow.parquet
import pytest
import transformers

from grpo.parts.data.prompts import load_prompts
from oracle.data import read_sets
from tests.conftest import tiny_config, write_rows

CHAT = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3", "tool_calls": None}]
LONG = "1" * 60
# How messages are written: with a tag of training, an option, tools, special tokens; a template may trim what it gets.
TEMPLATE = (
    "{%- if mark is defined %}{{ mark }}{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% for m in messages %}{% if m.role == 'system' %}>{{ m.content }}{% continue %}{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}+{{ m.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ '<' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
ROWS = [
    {"prompt": "12", "answer": "21", "hint": "7", "source": "reverse"},
    {"prompt": CHAT, "answer": ["1", 2], "hint": ["7", 8], "tools": [{"name": "f", "of": None}]},
    {"prompt": [*CHAT, {"role": "assistant", "content": "45 "}], "answer": {"a": 1}, "hint": 5},
    {"prompt": [{"role": "system", "content": "9"}, *CHAT], "answer": True, "hint": "", "source": None},
    {"prompt": LONG, "answer": 5, "hint": "1"},
    {"prompt": "4", "answer": 1.5, "hint": LONG, "chat_template_kwargs": '{"mark": "-."}'},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer of any text."""
    folder = tmp_path_factory.mktemp("model")
    made = make_tiny.bpe_tokenizer(["arguments"], 300)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    return folder


def assert_alike(model, value, key="train", **data):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    cfg = tiny_config().data.model_copy(update={"train": value, "eval": value, "max_prompt_tokens": 50} | data)
    theirs = load_prompts(cfg, tokenizer, 2**31 - 1, key)
    sets = getattr(theirs, "sets", [theirs])
    read = read_sets(cfg, key, tokenizer)
    assert [weight for weight, _ in read] == getattr(theirs, "weights", [1.0])
    for prompts, (_, ours) in zip(sets, read, strict=True):
        assert len(ours) == len(prompts) > 0
        for one, other in zip(ours, prompts, strict=True):
            asked = None if other.asked is None else other.asked.tolist()
            assert one == (other.ids, other.answer, other.source, other.row, asked)
    return ours


@pytest.mark.parametrize("options", [
    {}, {"system_prompt": "3", "template_kwargs": {"mark": "."}},
    {"hint_key": "hint"}, {"hint_key": "hint", "key": "eval"},
])  # fmt: skip
def test_rows_become_the_same_prompts(model, tmp_path, options):
    file = tmp_path / "rows.jsonl"
    write_rows(file, ROWS)
    ours = assert_alike(model, str(file), chat_template=True, **options)
    assert len(ours) == (4 if options == {"hint_key": "hint"} else 5), "the long ones are dropped"


def test_a_prompt_without_a_template(model, tmp_path):
    file = tmp_path / "rows.jsonl"
    write_rows(file, [{"of": {"text": "12"}, "answer": "1"}, {"of.text": "3", "answer": "2", "hint": "4"}])
    assert_alike(model, str(file), chat_template=False, prompt_key="of.text")
    file.write_text('[{"prompt": "1", "answer": 1.50, "n": 2.0}, {"prompt": "2", "answer": 1e3, "n": [0.10]}]')
    assert [prompt.answer for prompt in assert_alike(model, str(file), chat_template=False)] == ["1.50", "1e3"]


def test_other_files_and_mixtures(model, tmp_path):
    """Arrow gives messages the keys of others, and has numbers of 32 bits."""
    rows = [
        {**row, "answer": json.dumps(row["answer"]), "hint": "1"} for row in ROWS if isinstance(row["prompt"], list)
    ]
    table = pyarrow.Table.from_pylist(rows).append_column("x", pyarrow.array([0.1, 0.2, None], pyarrow.float32()))
    table = table.append_column("d", pyarrow.array([Decimal("1.50")] * 3))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.parquet.write_table(table.drop(["x"]), tmp_path / "b.parquet")
    for answer_key in ("answer", "d"):
        for file in ("a", "b"):
            assert_alike(model, str(tmp_path / f"{file}*.parquet"), chat_template=True, answer_key=answer_key)

    (tmp_path / "a.csv").write_text('prompt,answer,source\n1,007,\n"2\n3",n/a,"b,c"\n')
    assert_alike(model, {str(tmp_path / "a.csv"): 2.0, str(tmp_path / "a.parquet"): 1.0}, chat_template=True)
    assert_alike(model, [str(tmp_path / "a.csv")], chat_template=True, source_key="answer")
