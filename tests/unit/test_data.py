"""Data as people have it: every format gives the same prompts, and bad data is refused by file, row or column."""

import datetime
import json
import pickle
import re
from pathlib import Path
from unittest import mock

import datasets
import make_tiny
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
import transformers
from make_smollm2 import addition_rows
from torch.utils.data import ConcatDataset

from config import DataConfig, RankError
from grpo.parts.data.prompts import Prompt, check_opening, check_reading, load_prompts, load_tokenizer
from grpo.parts.data.tables import find_sources
from grpo.run.inputs import first_day
from tests.conftest import refused, tiny_config, write_rows

# What a careless reader would change: leading zeros, the text "None", a number that is text, commas, line breaks.
ROWS = [
    {"prompt": f"{i}+{i}=>", "answer": answer, "source": "sums"}
    for i, answer in enumerate(["007", "None", "1.0", 'a "b", c\nd', "1e3", "ü"])
]
VERL = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": i, "answer": row["answer"]},
    }
    for i, row in enumerate(ROWS)
]
VERL_KEYS = {"prompt_key": "prompt", "answer_key": "reward_model.ground_truth", "source_key": "data_source"}
ROLES = "{% for m in messages %}{{ {'system': '+', 'user': '-'}[m.role] }}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, rows):
    """`rows` as a file (or saved folder) of the type that the name says."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".jsonl":
        write_rows(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".arrow":
        with (pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file)(path, table.data.schema) as writer:
            writer.write_table(table.data.table)
    else:
        {".parquet": table.to_parquet, ".csv": table.to_csv, "": table.save_to_disk}[path.suffix](path)


def wordy(template):
    """A tokenizer of any text, with a chat template."""
    made = make_tiny.bpe_tokenizer(["arguments"], 300)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)


@pytest.fixture
def load(tokenizer):
    """load("a file", option=...) → its prompts."""
    return lambda train, **options: load_prompts(DataConfig(train=train, **options), tokenizer, 16)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "stream.arrow", "file.arrow", "a.csv", "saved"])
def test_every_format_gives_the_same_prompts(load, tokenizer, name):
    write(name, ROWS)
    prompts = load(name)
    assert [(p.ids, p.answer, p.source) for p in prompts] == [
        (tokenizer(row["prompt"])["input_ids"], row["answer"], "sums") for row in ROWS
    ]
    assert prompts.dropped == 0 and prompts[3].row == ROWS[3]


def test_shards_as_list_glob_folder_and_split(load):
    write("all.parquet", ROWS)
    for i in range(3):
        write(f"shards/s-{i}.parquet", ROWS[2 * i : 2 * i + 2])
        write(f"hub/data/train-0000{i}-of-00003.parquet", ROWS[2 * i : 2 * i + 2])
    write("hub/data/test-00000-of-00001.parquet", ROWS[:1])
    wanted = load("all.parquet").fingerprint
    shards = [f"shards/s-{i}.parquet" for i in range(3)]
    for train in (shards, "shards/*.parquet", "shards", "hub"):
        assert load(train).fingerprint == wanted
    assert load(shards[::-1]).fingerprint != wanted
    assert len(load("hub:test")) == 1
    with pytest.raises(ValueError, match=r"no data files of the split 'dev'; give .*:split with one of train, test"):
        load("hub:dev")


def test_hub_names(load, monkeypatch):
    load_dataset = mock.Mock(return_value=datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    wanted = {"a/b": (None, "train"), "a/b:test": (None, "test"), "a/b:main:test[:10]": ("main", "test[:10]")}
    for given, (name, split) in wanted.items():
        assert len(load(given)) == len(ROWS)
        load_dataset.assert_called_with(path="a/b", name=name, split=split)


def test_nested_columns_and_a_column_with_a_dot_in_its_name(load):
    """Data prepared for verl load unchanged; a column of exactly the key's name wins; a list of answers stays one."""
    write("plain.parquet", ROWS)
    plain = [(p.ids, p.answer, p.source) for p in load("plain.parquet")]
    fingerprints = set()
    for name in ("verl.parquet", "verl.jsonl"):
        write(name, VERL)
        prompts = load(name, **VERL_KEYS)
        assert [(p.ids, p.answer, p.source) for p in prompts] == plain and prompts[1].row == VERL[1]
        fingerprints.add(str(prompts.fingerprint))
    assert len(fingerprints) == 1
    write("a.jsonl", [{"prompt": "1>", "x": {"y": "inner"}, "x.y": "outer"}])
    assert load("a.jsonl", answer_key="x.y")[0].answer == "outer"
    write("b.parquet", [{"prompt": "1>", "answer": ["7", "seven"]}])
    assert load("b.parquet")[0].answer == ["7", "seven"]


def test_chat_template_system_prompt_and_kwargs(load, tokenizer):
    tokenizer.chat_template = ROLES + "{% if enable_thinking %}={% endif %}"
    own = [{"role": "system", "content": "7"}, {"role": "user", "content": "3"}]
    plain = [{"role": "user", "content": "2", "name": "me"}]  # a key that the others lack
    write("a.parquet", [{"prompt": prompt, "answer": "1"} for prompt in (plain, own)])
    write("b.jsonl", [{"prompt": "2", "answer": "1"}])
    options = {"system_prompt": "9", "template_kwargs": {"enable_thinking": True}}
    assert [tokenizer.decode(p.ids) for p in load("a.parquet", **options)] == ["+9-2=", "+7-3="]
    assert tokenizer.decode(load("b.jsonl")[0].ids) == "-2"
    assert tokenizer.decode(load("b.jsonl", chat_template=False)[0].ids) == "2"

    with pytest.raises(ValueError, match=r"data\.system_prompt .* only with data\.chat_template=true"):
        load("b.jsonl", chat_template=False, **options)
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: 'prompt' .* needs data\.chat_template=true"):
        load("a.parquet", chat_template=False)

    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"b\.jsonl, row 1: .*chat template refuses.*roles must alternate"):
        load("b.jsonl")


CALLS = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{% endfor %}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_message_has_its_own_keys_and_not_those_of_other_rows(name):
    tokenizer = wordy(CALLS)
    calls = [{"flag": [1, 2]}, {"text": "934"}, {"number": {"x": 1}}]
    chats = [
        [{"role": "user", "content": "7"}, {"role": "assistant", "content": None, "tool_calls": [{"arguments": call}]}]
        for call in calls
    ]
    chats = [[*chat, {"role": "user", "content": "8"}] for chat in chats]
    write(name, [{"prompt": chat, "answer": "1"} for chat in chats])
    said = [tokenizer.decode(p.ids) for p in load_prompts(DataConfig(train=name), tokenizer, 300)]
    assert said == [f'7[{{"arguments": {json.dumps(call)}}}]8' for call in calls]


def test_an_answer_is_the_text_that_a_json_file_has(load):
    texts = [str(10**30 + 7), str(10**30 + 8), "126", "0.50", "1e3", "true", '"2024-05-01"', '"007"']
    rows = "".join(f'{{"prompt": "1", "answer": {text}}}\n' for text in texts)
    Path("a.jsonl").write_text("\ufeff" + rows)
    prompts = load("a.jsonl")
    assert [p.answer for p in prompts] == [*texts[:5], "True", "2024-05-01", "007"]
    assert prompts[3].row == {"prompt": "1", "answer": 0.5} == pickle.loads(pickle.dumps(prompts[3].row))


def test_the_model_goes_on_with_an_assistants_message(load, tokenizer):
    tokenizer.chat_template = (
        ROLES.replace("'-'}", "'-', 'assistant': '='}") + "{% if add_generation_prompt %}={% endif %}"
    )
    chat = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "+4"}]
    write("a.jsonl", [{"prompt": chat[:number], "answer": "1"} for number in (1, 2)])
    assert [tokenizer.decode(p.ids) for p in load("a.jsonl")] == ["-3=", "-3=+4"]


TOOLS = "{{ tools | tojson if tools }}{% if enable_thinking %}={% endif %}" + ROLES


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "text.parquet"])
def test_a_row_brings_its_own_tools_and_options_of_the_template(name):
    tokenizer = wordy(TOOLS)
    tools = [[{"name": "f", "x": {"a": 1}}], [{"name": "g", "x": {"b": 2}}], None, []]
    options = [{"enable_thinking": True, "z": 1}, {"enable_thinking": False}, {"z": 1}, None]
    if name == "text.parquet":
        tools, options = map(json.dumps, tools), map(json.dumps, options)
    rows = zip(tools, options, strict=True)
    write(name, [{"prompt": "2", "answer": "1", "tools": t, "chat_template_kwargs": o} for t, o in rows])
    cfg = DataConfig(train=name, template_kwargs={"enable_thinking": True})
    said = [tokenizer.decode(p.ids) for p in load_prompts(cfg, tokenizer, 300)]
    assert said == ['[{"name": "f", "x": {"a": 1}}]=-2', '[{"name": "g", "x": {"b": 2}}]-2', "=-2", "=-2"]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
RENDERED = {  # of a template and a text of a later row, whether the text has been through the template
    (CHATML, "<|im_start|>user\n2<|im_end|>\n"): True,
    (CHATML, "<|im_start|> is what?"): False,
    ("<s>" + CHATML, "<s><|im_start|>user\n2<|im_end|>"): True,
    ("<s>[INST] {{ messages[-1].content }} [/INST]", "[INST] 2 [/INST]"): True,
    ("+{{ messages[-1].content }}=", "+2"): False,
}


@pytest.mark.parametrize("template, text", RENDERED)
@pytest.mark.parametrize("chat", [False, True])
def test_every_prompt_is_looked_at_for_a_template(template, text, chat):
    tokenizer = wordy(template)
    value = [{"role": "user", "content": text}] if chat else text
    write_rows(Path("a.jsonl"), [{"prompt": "2", "answer": "1"}, {"prompt": value, "answer": "1"}])
    cfg = DataConfig(train={"a.jsonl": 1})
    if not RENDERED[template, text]:
        assert len(load_prompts(cfg, tokenizer, 300)) == 2
        return
    with pytest.raises(ValueError, match=r"a\.jsonl, row 2: 'prompt' begins as the chat template does"):
        load_prompts(cfg, tokenizer, 300)


OPENINGS = {  # text of a prompt → what is refused
    "+12=": None,
    "12": r"a prompt begins with '1', not with the chat template's opening '\+'",
}


def test_a_template_that_was_not_applied_is_refused(tokenizer):
    tokenizer.chat_template = "+{{ messages[0]['content'] }}="
    for text, error in OPENINGS.items():
        prompt = Prompt(tokenizer(text)["input_ids"], "", "", {"prompt": text})
        with refused(ValueError, error):
            check_opening(prompt, DataConfig(train="no", chat_template=True), tokenizer)


def test_a_text_that_brings_the_tokenizers_first_token_is_refused(load, tokenizer):
    tokenizer.bos_token = "<eos>"
    write("a.jsonl", [{"prompt": "1", "answer": "1"}, {"prompt": "<eos><eos>5", "answer": "1"}])
    with pytest.raises(ValueError, match=r"row 2: 'prompt' begins with two '<eos>'"):
        load("a.jsonl", chat_template=False)


SAID = {"role": "assistant", "content": "3+4=7"}
WARNED = {  # rows, of which all but the last are three times in the file → what is warned
    "answers": (
        [{"prompt": [SAID], "answer": ["seven", 7]}, {"prompt": "1", "answer": "1"}],
        "3 of 4 prompts end with",
    ),
    "begun": ([{"prompt": [SAID], "answer": "8"}, {"prompt": [SAID], "answer": "7"}], ""),
    "tools": ([{"prompt": "1", "answer": "1", "tools": [{"a": 1}]}] * 2, "rows have 'tools', which"),
    "no tools": ([{"prompt": "1", "answer": "1", "tools": "[]"}] * 2, ""),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_is_warned_of_a_set_once(load, tokenizer, capsys, name):
    rows, said = WARNED[name]
    tokenizer.chat_template = "{{ messages[-1].content }}"
    write_rows(Path("a.jsonl"), [rows[0]] * 3 + rows[1:])
    load("a.jsonl")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(said) and said in "".join(lines)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float16()], ids=str)
def test_a_number_of_32_or_16_bits_is_what_was_written(load, kind):
    nested = pa.array([{"a": [0.1]}, None], pa.struct([("a", pa.list_(kind))]))
    numbers = {"answer": pa.array([0.1, 3.14], kind), "nested": nested, "double": [0.10000000149011612] * 2}
    pa.parquet.write_table(pa.table({"prompt": ["1", "1"], **numbers}), "a.parquet")
    first, second = load("a.parquet")
    assert (first.answer, second.answer, second.row["nested"]) == ("0.1", "3.14", None)
    assert (first.row["nested"], first.row["double"]) == ({"a": [0.1]}, 0.10000000149011612)


def test_a_template_that_writes_todays_date_gets_that_of_the_run(load, tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%d%m%Y') }}" + ROLES
    write("a.jsonl", ROWS)
    first, second = (load("a.jsonl", date=date) for date in ("2026-11-27", "2026-11-28"))
    assert (
        tokenizer.decode(first[0].ids) == "27112026-0+0=>" and first.fingerprint["rows"] == second.fingerprint["rows"]
    )


def test_the_date_of_a_run_is_that_of_its_first_start(tmp_path):
    cfg = tiny_config(f"output_dir={tmp_path}", "resume=auto")
    assert first_day(cfg) == str(datetime.date.today())
    for step, day in ((2, "2025-01-03"), (1, "2025-01-02")):
        Path(f"checkpoints/step_{step:06d}").mkdir(parents=True)
        state = {"config": {"data": {"date": day}}}
        Path(f"checkpoints/step_{step:06d}/state.json").write_text(json.dumps(state))
    assert first_day(cfg) == "2025-01-03"
    assert first_day(tiny_config(f"resume={tmp_path}/checkpoints/step_000001")) == "2025-01-02"


def test_an_end_token_that_the_tokenizer_adds_is_left_out_of_prompts(load, tokenizer):
    write("a.jsonl", ROWS)
    plain = [p.ids for p in load("a.jsonl", chat_template=False)]
    end = tokenizer.eos_token
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    assert tokenizer("1")["input_ids"][-1] == tokenizer.eos_token_id
    assert [p.ids for p in load("a.jsonl", chat_template=False)] == plain


def test_an_end_token_that_stands_for_unknown_characters_is_not_one_that_is_added():
    made = make_tiny.char_tokenizer("12>")
    made.model = tokenizers.models.WordLevel(made.get_vocab(), unk_token="<eos>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    assert tokenizer("a")["input_ids"] == [tokenizer.eos_token_id]
    write("a.jsonl", [{"prompt": "12>", "answer": "1"}])
    (prompt,) = load_prompts(DataConfig(train="a.jsonl", chat_template=False), tokenizer, 16)
    assert tokenizer.decode(prompt.ids) == "12>"


LOSES = (
    "reads 'What is 5 the tool[?]' as 'Whatis5thetool[?]', tokenizer.json as 'What is 5 the tool[?]'.*LlamaTokenizer"
)
READINGS = [  # architecture, tokenizer_config.json, what is changed of the tokenizer, what is said
    ("llama", {"tokenizer_class": "LlamaTokenizerFast"}, {}, LOSES),
    ("mistral", {"tokenizer_class": "LlamaTokenizer"}, {}, None),  # transformers takes no class for its word
    ("llama", {"tokenizer_class": "Qwen2Tokenizer"}, {}, "warning: .*Qwen2Tokenizer of transformers gives 1 of 1"),
    ("llama", {"clean_up_tokenization_spaces": True, "add_bos_token": True, "bos_token": "<eos>"}, {}, None),
    ("llama", {}, {"normalizer": tokenizers.normalizers.Lowercase()}, None),
]


@pytest.mark.parametrize("arch, config, change, said", READINGS)
def test_transformers_reads_the_folders_tokenizer_json(tmp_path, capsys, arch, config, change, said):
    made = make_tiny.bpe_tokenizer(["What is 5 the tool?"] * 3, 300)
    made.enable_truncation(4)
    for name, value in change.items():
        setattr(made, name, value)
    make_tiny.save_model(tmp_path / "model", made, arch, hidden=64)
    file = tmp_path / "model/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))

    tokenizer = load_tokenizer(tmp_path / "model")
    write("a.jsonl", [{"prompt": "What is 5 the tool?", "answer": "1"}])
    cfg = DataConfig(train="a.jsonl")
    prompts = load_prompts(cfg, tokenizer, 400)
    with refused(ValueError, said if said is LOSES else None):
        check_reading(tmp_path / "model", tokenizer, prompts, cfg)
        assert re.search(said or "^$", capsys.readouterr().out)


def test_templates_and_tokenizers_that_lose_the_prompt_are_refused(load, tokenizer):
    write("a.jsonl", ROWS)
    tokenizer.chat_template = "12="
    with pytest.raises(ValueError, match=r"^data.train: all prompts of .* have the same tokens, \[.*tokenizer.json"):
        load("a.jsonl")
    write("same.jsonl", [ROWS[0]] * 2)
    assert len(load("same.jsonl")) == 2
    tokenizer.chat_template = "{{ messages[0].content }}"
    chat = [{"role": "user", "content": [{"type": "text", "text": "7"}]}]
    write("parts.jsonl", [{"prompt": chat, "answer": "1"}])
    with pytest.raises(ValueError, match=r"row 1: .* writes a part of 'prompt' as Python does, \[\{'type'"):
        load("parts.jsonl")


def test_long_prompts_are_counted_and_empty_ones_refused(load, tokenizer):
    write("a.jsonl", [{"prompt": "1" * n, "answer": "1"} for n in (1, 5, 9)])
    prompts = load("a.jsonl", max_prompt_tokens=5)
    assert [len(p.ids) for p in prompts] == [1, 5] and prompts.dropped == 1
    tokenizer.chat_template = "{{ messages[0].content | trim }}"
    for empty in ("", " "):
        write("b.jsonl", [{"prompt": "1", "answer": "1"}, {"prompt": empty, "answer": "1"}])
        with pytest.raises(ValueError, match=r"b\.jsonl, row 2: 'prompt' is empty"):
            load("b.jsonl")


@pytest.mark.parametrize(
    "key, options, said",
    [
        ("train", {"chat_template": False}, r"data\.train: .*, row 2: 'prompt'"),
        ("eval", {"system_prompt": "1"}, r"data\.eval: .*, row 2: 'prompt'"),
        ("train", {"system_prompt": "1="}, r"data\.system_prompt"),
        ("train", {"hint_key": "hint", "chat_template": False}, r"data\.train: .*, row 1: the hint 'hint'"),
    ],
)
def test_a_token_that_the_model_has_no_row_for(tokenizer, key, options, said):
    """Of 16 tokens "=" is the last, so 15 rows are too few; a prompt that is too long is not looked at."""
    write("a.jsonl", [{"prompt": text, "answer": "1", "hint": "="} for text in ("1", "1=", "22===")])
    cfg = DataConfig(**{"train": "no", key: "a.jsonl"}, max_prompt_tokens=4, **options)
    assert load_prompts(cfg, tokenizer, 16, key).dropped == 1
    with pytest.raises(ValueError, match=rf"^{said}: the token '=' has the id 15, .* model\.path has 15 rows .*resize"):
        load_prompts(cfg, tokenizer, 15, key)


CUSTOM = """
import json

def rows(name):
    for i in range(int(name)):
        yield {"prompt": f"{i}>", "answer": i, "source": name, "seen": {i}}

def no_dict(name):
    return [{"prompt": "1", "answer": "1"}, ["1", "1"]]

def fails(name):
    yield {"prompt": "1", "answer": "1"}
    raise KeyError(name)

"""


def test_rows_of_a_function(load, tokenizer):
    Path("rows_of_mine.py").write_text(CUSTOM)

    def own(function, train="3"):
        return load(train, custom=f"rows_of_mine.py:{function}")

    prompts = own("rows")
    assert [(p.answer, p.source, p.row["seen"]) for p in prompts] == [(str(i), "3", {i}) for i in range(3)]
    assert tokenizer.decode(prompts[2].ids) == "2>"
    cfg = DataConfig(train={"3": 1, "5": 2}, eval=["1", "2"], custom="rows_of_mine.py:rows")
    assert len(load_prompts(cfg, tokenizer, 16)) == 8 and len(load_prompts(cfg, tokenizer, 16, "eval")) == 3
    for function, message in {
        "no_dict": "row 2 of data.train=3 is a list, not a dict",
        "fails": r"for data.train=3 it failed: KeyError: '3' \(rows_of_mine.py, line 13\)",
        "nowhere": "rows_of_mine.py has no function 'nowhere'",
    }.items():
        with pytest.raises(ValueError, match=rf"^data\.custom=rows_of_mine\.py:{function}: .*{message}"):
            own(function)


GOOD = b'{"prompt": "1", "answer": "1"}\n'
BAD_FILES = {
    "empty.jsonl": (b"", "empty.jsonl has no rows"),
    "broken.jsonl": (GOOD + b'\n{"prompt": ', "broken.jsonl, line 3: Expecting value"),
    "cut.json": (b'[{"prompt": "1"}', "cut.json: Expecting ',' or the end of the list: line 1 column 17"),
    "no_object.json": (b'[{"prompt": "1"}, "\\u005d"]', "no_object.json, row 2: not a JSON object"),
    "deep.jsonl": (GOOD + b'{"prompt": ' + b"[" * 20000, "deep.jsonl, line 2: too many lists"),
    "deep.json": (b'[{"prompt": "1", "answer": %s}]' % (b"[" * 700 + b"]" * 700), "deep.json.*: too many lists"),
    "broken.json": (b'[{"prompt": "1"},\n{"prompt": ]', "broken.json: Expecting value: line 2 column 12"),
    "scalar.jsonl": (GOOD + b"5\n", "scalar.jsonl, line 2: not a JSON object"),
    "latin.jsonl": (
        GOOD + b'{"prompt": "\xfc", "answer": "1"}\n',
        "latin.jsonl, line 2: 'utf-8' codec can't decode byte 0xfc in position 12",
    ),
    "commas.csv": (b"prompt,answer\n1,2,3\n", "commas.csv.* row 1 has more fields than the header"),
    "answer.jsonl": (GOOD + b'{"prompt": "1", "answer": null}\n', "answer.jsonl, row 2: 'answer' is null"),
    "chat.jsonl": (b'{"prompt": [{"role": "user"}], "answer": "1"}\n', "row 1: 'prompt' is neither text nor a list of"),
    "half.jsonl": (
        b'{"prompt": "\\ud800", "answer": "1"}\n',
        "half.jsonl, row 1: 'prompt' has half of a surrogate pair",
    ),
    "nan.jsonl": (GOOD + b'{"prompt": "1", "answer": NaN}\n', "nan.jsonl, row 2: 'answer' is nan, not a number"),
    "image.jsonl": (
        b'{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1"}]}], "answer": "1"}',
        "image.jsonl, row 1: 'prompt' has a part of type 'image', and models are trained on text alone",
    ),
    "video.jsonl": (GOOD + b'{"prompt": "1", "answer": "1", "video": {"path": "a"}}', "row 2: 'video' is not"),
    "placeholder.jsonl": (
        b'{"prompt": "<image>1", "answer": "1", "images": []}',
        "row 1: 'images' .* its <image> is in",
    ),
    "tools.jsonl": (b'{"prompt": "1", "answer": "1", "tools": "hammer"}', "row 1: 'tools' must be a list"),
    "kwargs.jsonl": (
        b'{"prompt": "1", "answer": "1", "chat_template_kwargs": {"tokenize": true}}',
        "row 1: .*'tokenize'",
    ),
    "a.txt": (b"1", "a.txt is of no known type.*parquet"),
}


def test_a_text_may_speak_of_images(load, tokenizer):
    """An empty column says nothing, and without one <image> is a text like others."""
    tokenizer.chat_template = "{{ messages[-1].content }}"
    empty = [{"images": []}, {"image": None}, {"videos": [None]}, {"video": False, "prompt": "<image>"}]
    write_rows(Path("a.jsonl"), [{"prompt": "1", "answer": "1", **columns} for columns in empty])
    assert len(load("a.jsonl")) == len(empty)


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(load, name):
    content, message = BAD_FILES[name]
    Path(name).write_bytes(content)
    with pytest.raises(ValueError, match=r"^data\.train.*" + message):
        load(name)


def test_damaged_parquet_and_arrow(load):
    for name in ("a.parquet", "stream.arrow", "file.arrow"):
        write(name, ROWS)
        content = Path(name).read_bytes()
        Path(name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=rf"^data\.train: .*{name}: "):
            load(name)


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_large_sets_stay_mapped_and_give_the_same(load, monkeypatch, kind):
    """Rows, ids, and what is said of a mistake, where a block ends inside the second file."""
    for name, rows in {f"a.{kind}": VERL, f"b.{kind}": [*VERL, {**VERL[0], "reward_model": None}]}.items():
        write(name, rows)
    files = [f"a.{kind}", f"b.{kind}"]
    held = load([files[0]] * 2, max_prompt_tokens=5, **VERL_KEYS)
    monkeypatch.setattr("grpo.parts.data.prompts.LARGE_BYTES", 0)
    monkeypatch.setattr("grpo.parts.data.tokens.BLOCK", 4)
    mapped = load([files[0]] * 2, max_prompt_tokens=5, **VERL_KEYS)
    assert isinstance(held.table, list) and isinstance(mapped.table, (datasets.Dataset, ConcatDataset))
    assert list(mapped) == list(held) and len(held) == 12 and mapped.fingerprint == held.fingerprint
    with pytest.raises(ValueError, match=rf"^data\.train: .*b\.{kind}, row 7: 'reward_model\.ground_truth' is null"):
        load(files, **VERL_KEYS)


# ---------------------------------------------------------------- read as meant


CARD = """---
license: mit
configs:
- config_name: {name}
  data_files:
  - split: train
    path: [questions-*.jsonl]
  - split: test
    path: held_out.jsonl
- config_name: more
  data_dir: more
---
"""


@pytest.mark.parametrize(
    "name, train, found",
    [
        ("default", "a", "questions-0 questions-1"),
        ("main", "a:main:train", "questions-0 questions-1"),
        ("main", "a:more:test", "test"),
        ("main", "a", r"Config name is missing.* \['main', 'more'\]"),
        ("main", "a:other:train", r"FOLDER:CONFIGURATION:SPLIT.* 'other' not found. Available: \['main', 'more'\]"),
    ],
)
def test_a_folders_card_says_which_files_are_of_which_split(name, train, found):
    for file in ("held_out", "questions-0", "questions-1", "more/train", "more/test"):
        write(f"a/{file}.jsonl", ROWS[:1])
    Path("a/README.md").write_text(CARD.format(name=name))
    try:
        said = " ".join(Path(file).stem for file, _ in find_sources(train, "train", "data.train"))
    except ValueError as error:
        said = str(error)
    assert re.search(f"{found}$" if " " not in found[:12] else found, said), said


def test_columns_of_type_json_are_what_their_text_says(load, tokenizer):
    tokenizer.chat_template = ROLES
    chat = [{"role": "user", "content": "7", "name": None}, {"role": "system", "content": "8"}]
    rows = [
        {"prompt": "12>", "chat": chat, "calls": [{"f": [{"a": None}]}], "answer": "007"},
        {"prompt": chat[:1], "chat": chat, "calls": None, "answer": [10**15, 0.5]},
    ]
    text, texts = datasets.Json(), datasets.List(datasets.Json())
    features = {"prompt": text, "chat": texts, "calls": datasets.List({"f": texts}), "answer": text}
    datasets.Dataset.from_list(rows, datasets.Features(features)).to_parquet("a.parquet")

    for key, said in {"prompt": ["-12>", "-7"], "chat": ["-7+8", "-7+8"]}.items():
        prompts = load("a.parquet", prompt_key=key)
        assert [tokenizer.decode(p.ids) for p in prompts] == said
        assert [p.row for p in prompts] == rows and [p.answer for p in prompts] == ["007", [10**15, 0.5]]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_file_changed_while_the_run_reads_it(load, monkeypatch, name):
    monkeypatch.setattr("grpo.parts.data.prompts.LARGE_BYTES", 0)
    write(name, ROWS)
    prompts, before = load(name), Path(name).read_bytes()
    Path(name).touch()
    assert [p.answer for p in prompts] == [row["answer"] for row in ROWS]
    for change in (before.replace(b"007", b"008"), b""):
        Path(name).write_bytes(change)
        with pytest.raises(RankError, match=rf"{name} was changed while the run reads it"):
            prompts[0]
    Path(name).write_bytes(before)
    assert prompts[0].answer == "007"


@pytest.mark.parametrize(
    "change, differ",
    [
        ({"more": [[1, 2], [3, 4]]}, "columns besides the prompt"),
        ({"answer": "2"}, "rows, columns besides the prompt"),
        ({"template": "{{ messages[0].content }}="}, "token ids"),
        ({"letters": ">321"}, "token ids"),
        ({}, ""),
    ],
)
def test_what_is_compared_of_the_data(change, differ):
    """Rows with a resume, token ids with other machines too: another tokenizer or template makes other prompts."""

    def fingerprint(letters="123>", template="{{ messages[0].content }}", **row):
        row = {"prompt": "12>", "answer": "1", "more": [[1, 2], [3]], **row}
        write_rows(Path("a.jsonl"), [row, row | {"more": 1.5}])
        made = make_tiny.char_tokenizer(letters + "=")
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)
        return load_prompts(DataConfig(train="a.jsonl"), tokenizer, 16).fingerprint

    was, now = fingerprint(), fingerprint(**change)
    assert ", ".join(name for name in was if was[name] != now[name]) == differ


def test_files_that_do_not_go_together(load):
    write("a.jsonl", ROWS)
    write("number.parquet", [{"prompt": "1", "answer": 1, "source": "sums"}])
    write("b.parquet", ROWS)
    Path("empty").mkdir()
    for names, message in [
        (["b.parquet", "number.parquet"], r": a column must have one type in all files: .*answer.*int64.*string"),
        (["a.jsonl", "b.parquet"], r"mixes file types \(.*a\.jsonl, .*b\.parquet\)"),
        (["empty"], "empty .*: The directory at .*empty doesn't contain any data files"),
        (["nowhere/*.jsonl"], "no such file; use a file ending in"),
    ]:
        with pytest.raises(ValueError, match=rf"^data\.train.*{message}"):
            load(names)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt_key": "promt"}, r"^data\.prompt_key='promt': no such column in .*nearest is 'prompt'"),
        ({"answer_key": "reward_model.truth"}, "nearest is 'reward_model.ground_truth', all are .*extra_info.index"),
        ({"hint_key": "thought"}, r"^data\.hint_key='thought': no such column in .*verl\.parquet; all are data_source"),
    ],
)
def test_unknown_column(load, options, message):
    write("verl.parquet", VERL)
    with pytest.raises(ValueError, match=message):
        load("verl.parquet", **{**VERL_KEYS, **options})


def test_no_sum_that_make_llm_asks_for_was_trained_on():
    trained, asked = ({frozenset(re.findall(r"\d+", row["prompt"])) for row in rows} for rows in addition_rows())
    assert len(asked) > 30 and not trained & asked
