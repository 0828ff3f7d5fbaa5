import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from verl.common.errors import ConfigError, DataError
from verl.data.config import DataConfig
from verl.data.sources import read_rows

MESSAGES = [{"role": "user", "content": "hi"}]


def read(source):
    return list(read_rows(source, DataConfig(), "data.train"))


def values(source):
    return [row.values for row in read(source)]


def write_parquet(path, rows, schema=None):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def test_parquet_files_may_differ_in_an_optional_nested_field(tmp_path):
    first = write_parquet(tmp_path / "1.parquet", [{"prompt": MESSAGES, "extra_info": {"index": 0}}])
    second = write_parquet(tmp_path / "2.parquet", [{"prompt": MESSAGES, "extra_info": {"index": 1, "note": "x"}}])
    one, two = values([first, second])
    assert one["prompt"] == two["prompt"] == MESSAGES
    assert type(one["prompt"]) is list and type(one["prompt"][0]) is dict
    assert one["extra_info"].get("note") is None
    assert two["extra_info"] == {"index": 1, "note": "x"}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": 1}, {"a": "1"}),
        ({"a": None}, {"a": [1, 2]}),
        ({"a": [1]}, {"a": {"b": [{"c": None}]}}),
        ({"a": 1}, {"b": {"c": 2.5}}),
        ({"a": [[1], [2]]}, {"a": [{"role": "user"}]}),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_files_may_differ_in_columns_and_types(tmp_path, left, right, kind):
    paths = [str(tmp_path / f"{side}.{kind}") for side in "lr"]
    for path, row in zip(paths, (left, right), strict=True):
        if kind == "parquet":
            write_parquet(path, [row])
        else:
            Path(path).write_text(json.dumps(row if kind == "jsonl" else [row]))
    assert values(paths) == [left, right]


def test_parquet_rows_may_lack_optional_fields_and_have_empty_lists(tmp_path):
    rows = [{"p": MESSAGES, "e": {"a": 1}}, {"p": [], "e": None}, {"p": None, "e": {"a": None}}]
    assert values(write_parquet(tmp_path / "a.parquet", rows)) == rows


def test_a_null_column_and_a_long_file(tmp_path):
    schema = pyarrow.schema([("n", pyarrow.int32()), ("nothing", pyarrow.null())])
    path = write_parquet(tmp_path / "a.parquet", [{"n": i} for i in range(3000)], schema)
    read_back = read(path)
    assert [row.values["n"] for row in read_back] == list(range(3000))
    assert read_back[2999].values["nothing"] is None
    assert read_back[2999].where == f"{path}[2999]"


def test_jsonl_counts_lines_as_an_editor_does(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "hi\xe2\x80\xa8there"}\r\n\n{"prompt": "\xc3\xa9"}')
    assert [(row.where, row.values) for row in read(str(path))] == [
        (f"{path}:1", {"prompt": "hi\u2028there"}),
        (f"{path}:3", {"prompt": "é"}),
    ]


def test_bad_lines_are_all_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 2}\n[1]\n')
    with pytest.raises(DataError, match=rf"data\.train: 2 of 4 rows(.|\n)*{path}:2: (.|\n)*{path}:4: .*got list"):
        read(str(path))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.jsonl", b'{"a": "\xff\xfe"}', r"(?s)can't be used.*a\.jsonl:1: 'utf-8'"),
        ("a.json", b"[]", "holds no rows"),
        ("a.json", b'{"a": 1}', "must hold a list of objects, got dict"),
        ("a.json", b"[1]", r"a\.json\[0\] must be a JSON object, got int"),
        ("a.json", b'{"a": 1}\n{"a": 2}', r"isn't JSON.*name it \.jsonl"),
        ("a.parquet", b"not parquet", "can't read"),
        ("a.parquet", b"", "can't read"),
        ("a.csv", b"a,b", r"ends in '\.csv', allowed are \.jsonl, \.json, \.parquet"),
        ("a", b"{}", "ends in ''"),
    ],
)
def test_files_that_can_not_be_used_are_named(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    for source in (path, str(path)):
        with pytest.raises(DataError, match=said) as caught:
            read(source)
        assert "data.train" in str(caught.value) and str(path) in str(caught.value)


def test_a_parquet_file_without_rows(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [], pyarrow.schema([("prompt", pyarrow.string())]))
    with pytest.raises(DataError, match="holds no rows"):
        read(path)


def test_missing_files_name_the_nearest(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    for source in (tmp_path / "tran.jsonl", str(tmp_path / "tran.jsonl")):
        with pytest.raises(DataError, match=r"data\.train: no such file.*did you mean 'train\.jsonl'"):
            read(source)
    with pytest.raises(DataError, match=r"folder '.*absent' doesn't exist"):
        read(str(tmp_path / "absent" / "a.jsonl"))
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match="no such file"):
        read(str(tmp_path / "broken.jsonl"))


def test_patterns_are_sorted(tmp_path):
    for name in ("b-2", "b-1", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    assert values(f"{tmp_path}/b-*.jsonl") == [{"prompt": "b-1"}, {"prompt": "b-2"}]
    with pytest.raises(DataError, match="no file matches"):
        read(f"{tmp_path}/d-*.jsonl")


def test_a_folder_of_files_is_not_guessed_at(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"not one saved by datasets(.|\n)*It holds: train\.jsonl"):
        read(str(tmp_path))


def test_mappings_in_python():
    import numpy

    rows = [{"prompt": numpy.array([{"role": "user"}], dtype=object), "n": numpy.int64(3)}, {"t": (1, {"a": (2,)})}]
    assert values(rows) == [{"prompt": [{"role": "user"}], "n": 3}, {"t": [1, {"a": [2]}]}]
    assert [row.where for row in read(tuple(rows))] == ["rows[0]", "rows[1]"]
    assert type(values(rows)[0]["n"]) is int


@pytest.mark.parametrize("source", [3, {"prompt": "hi"}, [{"prompt": "hi"}, 3]])
def test_what_is_no_source(source):
    with pytest.raises(DataError, match=r"data\.train: can't read rows from"):
        read(source)


def test_datasets_in_memory_and_saved(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list([{"p": MESSAGES, "n": 1}, {"p": None, "n": None}])
    expected = [{"p": MESSAGES, "n": 1}, {"p": None, "n": None}]
    assert values(made) == values(made.with_format("numpy")) == values([made]) == expected
    made.save_to_disk(tmp_path / "plain")
    assert values(str(tmp_path / "plain")) == values(tmp_path / "plain") == expected
    assert read(tmp_path / "plain")[1].where == f"{tmp_path}/plain[1]"
    two = datasets.DatasetDict({"train": made, "test": made.select([0])})
    two.save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=r"several splits; choose one with .*two\?split=\.\.\., of test, train"):
        read(str(tmp_path / "two"))
    with pytest.raises(DataError, match="no split 'dev'"):
        read(f"{tmp_path}/two?split=dev")
    assert values(f"{tmp_path}/two?split=test") == expected[:1]
    assert values(datasets.DatasetDict({"only": made})) == expected
    for path in (tmp_path / "plain").glob("*.arrow"):
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match=r"data\.train: can't (load|read)"):
        read(str(tmp_path / "plain"))


def test_a_hub_name_without_network_says_so(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"data\.train: 'nobody/nothing' is no file or folder here.*hub failed"):
        read("nobody/nothing?name=main&split=train")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a/b?splt=train", "unknown option 'splt'.*did you mean 'split'"),
        ("a/b?split", "must read"),
        ("{}?split=train", "is a file"),
    ],
)
def test_options_are_checked(tmp_path, source, said):
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=said):
        read(source.format(tmp_path / "a.jsonl"))


GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K beside the checkout")
def test_gsm8k_loads_whole():
    from verl.data.prompts import load_prompts
    from verl.models.loading import character_tokenizer

    config = DataConfig(prompt_key="question", ground_truth_key="answer")
    rows = map(json.loads, (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines())
    tokenizer = character_tokenizer("".join(sorted({character for row in rows for character in row["question"]})))
    data = load_prompts(GSM8K / "test.jsonl", config, tokenizer)
    assert len(data) == data.report.rows_read == 1319
    assert data[0].ground_truth.endswith("#### 18") and data[0].extra == {}


def test_lines_of_another_encoding_are_named_like_other_broken_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "caf\xe9"}\r\n\r\n{"prompt": "\xc3\xa9"}\n{broken\n')
    with pytest.raises(DataError, match=r"(?s)2 of 4 rows .*rows\.jsonl:2: 'utf-8' codec can't .*rows\.jsonl:5: "):
        list(read_rows(str(path), DataConfig(), "data.train"))
