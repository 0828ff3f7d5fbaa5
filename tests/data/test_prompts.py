import json

import pytest

from tests.tiny import word_tokenizer
from verl.common.errors import ConfigError, DataError
from verl.data.chat import encode_prompt
from verl.data.config import DataConfig
from verl.data.prompts import load_prompts, shared_prompts

WORDS = " ".join(f"w{i}" for i in range(10, 19))
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def rows(*prompts, **more):
    return [{"prompt": prompt, "ground_truth": i, **more} for i, prompt in enumerate(prompts)]


def words(count):
    return " ".join(WORDS.split()[:count])


def as_text(count):
    """A plain prompt of ``count`` tokens, BOS counted."""
    return words(count - 1)


def as_messages(count):
    """Messages that render to ``count`` tokens: <s> [U] ... [A]; the two turns of the second kind add more."""
    return [{"role": "user", "content": words(count - 3)}]


def as_turns(count):
    """Like ``as_messages`` with an earlier turn: <s> [U] [A] </s> [U] ... [A]."""
    return [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, *as_messages(count - 3)]


FORMS = {"text": as_text, "messages": as_messages, "turns": as_turns}
LENGTHS = {"text": (3, 8, 9), "messages": (4, 8, 9), "turns": (7, 8, 9)}


def load(form, overlong, **keys):
    config = DataConfig(max_prompt_tokens=8, overlong_prompts=overlong, **keys)
    tokenizer = word_tokenizer(chat_template=form != "text")
    source = rows(*(FORMS[form](n) for n in LENGTHS[form]))
    whole = [encode_prompt(tokenizer, row["prompt"], config) for row in source]
    assert [len(ids) for ids in whole] == list(LENGTHS[form])
    return load_prompts(source, config, tokenizer), whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keys", [{}, {"chat_template_kwargs": {"tools": TOOLS}}])
def test_overlong_prompts_are_dropped_counted_and_named(form, keys):
    data, whole = load(form, "drop", **keys)
    assert [list(row.prompt_ids) for row in data] == whole[:2]
    assert (data.report.rows_read, data.report.rows_kept) == (3, 2)
    (incident,) = data.report.dropped["overlong"]
    assert (incident.row_id, incident.where, incident.detail) == (2, "rows[2]", "9 tokens, limit 8")
    assert data.report.summary() == "read 3 rows, kept 2; 1 dropped (overlong): rows[2] (9 tokens, limit 8)"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keys", [{}, {"chat_template_kwargs": {"tools": TOOLS}}])
def test_overlong_prompts_are_an_error_that_names_row_length_and_limit(form, keys):
    with pytest.raises(DataError, match=r"1 of 3 rows(.|\n)*rows\[2\] \(row 2\): 9 tokens, limit 8"):
        load(form, "error", **keys)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("side", "kept"), [("left", slice(1, 9)), ("right", slice(0, 8))])
@pytest.mark.parametrize("keys", [{}, {"chat_template_kwargs": {"tools": TOOLS}}])
def test_overlong_prompts_are_cut(form, side, kept, keys):
    data, whole = load(form, side, **keys)
    assert [list(row.prompt_ids) for row in data] == [whole[0], whole[1], whole[2][kept]]
    assert [incident.row_id for incident in data.report.truncated] == [2]
    assert data.report.dropped == {}


def test_rows_that_are_no_prompts_are_named_before_those_that_are_too_long():
    config = DataConfig(max_prompt_tokens=4, overlong_prompts="error")
    source = rows("hi", "hi w6", None, "hi w6 w7", 5)
    with pytest.raises(DataError) as error:
        load_prompts(source, config, word_tokenizer(), key="data.val")
    assert str(error.value) == (
        "data.val: 2 of 5 rows can't be used. Mend or remove these rows:\n"
        "  rows[2] (row 2): column 'prompt' (data.prompt_key) is null; the row has 'prompt', 'ground_truth'\n"
        "  rows[4] (row 4): a prompt is text or a list of {role, content} messages, got int 5"
    )
    with pytest.raises(DataError) as error:
        load_prompts(source[:2] + source[3:4], config, word_tokenizer())
    assert str(error.value) == (
        "data.train: 2 of 3 rows can't be used. Raise data.max_prompt_tokens or set data.overlong_prompts to drop, "
        "left or right:\n  rows[1] (row 1): 5 tokens, limit 4\n  rows[2] (row 2): 6 tokens, limit 4"
    )


def test_the_limit_counts_system_prompt_and_tools():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for t in tools or [] %}w9 {% endfor %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    )
    config = DataConfig(max_prompt_tokens=2, system_prompt="w8", chat_template_kwargs={"tools": TOOLS})
    with pytest.raises(DataError, match=r"all 1 rows have prompts longer than data\.max_prompt_tokens = 2"):
        load_prompts(rows("hi"), config, tokenizer)


def test_all_rows_dropped_is_an_error():
    with pytest.raises(DataError, match=r"data\.train: all 2 rows .* = 2\..*rows\[0\] \(4 tokens, limit 2\)"):
        load_prompts(rows("hi", "hi"), DataConfig(max_prompt_tokens=2), word_tokenizer())


def test_row_ids_are_stable_under_dropping_and_over_sources(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows("hi", WORDS)))
    (tmp_path / "b.json").write_text(json.dumps(rows("w6", "w7")))
    source = [str(tmp_path / "a.jsonl"), tmp_path / "b.json", rows("w8")]
    data = load_prompts(source, DataConfig(max_prompt_tokens=8), word_tokenizer())
    assert [(row.row_id, row.ground_truth, row.prompt) for row in data] == [
        (0, 0, "hi"),
        (2, 0, "w6"),
        (3, 1, "w7"),
        (4, 0, "w8"),
    ]
    assert [row.source for row in data] == [str(tmp_path / "a.jsonl"), *[str(tmp_path / "b.json")] * 2, "rows"]
    assert data.report.dropped["overlong"][0].where == f"{tmp_path}/a.jsonl:2"


@pytest.mark.parametrize("truth", [0, False, 1.5, "", "72", [1, {"a": 2}], {"nested": [None]}])
def test_ground_truth_of_any_type(truth):
    data = load_prompts([{"prompt": "hi", "ground_truth": truth}], DataConfig(), word_tokenizer())
    assert data[0].ground_truth == truth and type(data[0].ground_truth) is type(truth)


def test_other_columns_are_kept_and_filled_where_absent():
    source = [{"prompt": "hi", "ground_truth": 1, "level": 3}, {"prompt": "hi", "ground_truth": "1", "note": "x"}]
    data = load_prompts(source, DataConfig(), word_tokenizer())
    assert [row.extra for row in data] == [{"level": 3, "note": None}, {"level": None, "note": "x"}]
    assert [row.ground_truth for row in data] == [1, "1"]


def test_columns_by_other_names_and_inside_others():
    source = [{"question": "hi", "reward_model": {"ground_truth": 7}, "prompt": "unrelated"}]
    config = DataConfig(prompt_key="question", ground_truth_key="reward_model.ground_truth")
    (row,) = load_prompts(source, config, word_tokenizer())
    assert (row.prompt, row.ground_truth) == ("hi", 7)
    assert row.extra == {"reward_model": {"ground_truth": 7}, "prompt": "unrelated"}
    assert row.as_mapping()["prompt"] == "hi"


def test_no_ground_truth_where_none_is_asked_for():
    (row,) = load_prompts([{"prompt": "hi"}], DataConfig(ground_truth_key=None), word_tokenizer())
    assert row.ground_truth is None and row.extra == {}


NESTED = {"ground_truth_key": "reward_model.ground_truth"}


@pytest.mark.parametrize(
    ("source", "keys", "said"),
    [
        (
            [{"promt": "hi", "ground_truth": 1}],
            {},
            r"data\.prompt_key: no column 'prompt'.*did you mean 'promt'.*'ground_truth'",
        ),
        (
            [{"prompt": "hi", "answer": 1}],
            {},
            r"data\.ground_truth_key: no column 'ground_truth'.*'prompt', 'answer'.*null if",
        ),
        ([{"prompt": "hi"}], NESTED, r"no column 'reward_model\.ground_truth'.*It has 'prompt'"),
        ([{"prompt": "hi", "reward_model": {}}], NESTED, r"rows\[0\] \(row 0\): column 'reward_model\.ground_truth'"),
        ([{"prompt": "hi", "reward_model": None}], NESTED, "isn't in the row"),
        ([{"prompt": "hi", "reward_model": 3}], NESTED, "isn't in the row"),
        (rows("hi", None, "hi", 5), {}, r"2 of 4 rows(.|\n)*rows\[1\].*\(data\.prompt_key\) is null(.|\n)*got int 5"),
        (rows(*[None] * 7), {}, r"7 of 7 rows(.|\n)*and 2 more"),
        ([{"prompt": "hi", "ground_truth": None}], {}, r"'ground_truth' \(data\.ground_truth_key\) is null"),
        ([{}], {}, "It has no columns"),
        ([], {}, "data set is empty"),
    ],
)
def test_rows_that_can_not_be_used_are_named(source, keys, said):
    with pytest.raises(DataError, match=said):
        load_prompts(source, DataConfig(**keys), word_tokenizer())


def test_a_prompt_without_tokens_is_named():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(DataError, match="the prompt has no tokens"):
        load_prompts(rows("hi"), DataConfig(), tokenizer)


def test_a_limit_on_rows_takes_the_first(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows("hi", "w6", "w7")))
    train = load_prompts(str(path), DataConfig(), word_tokenizer(), max_rows=2)
    val = load_prompts([str(path), str(path)], DataConfig(), word_tokenizer(), key="data.val", max_rows=4)
    assert [row.prompt for row in train] == ["hi", "w6"]
    assert [row.prompt for row in val] == ["hi", "w6", "w7", "hi"]
    assert shared_prompts(train, val) == [0, 1, 3]
    assert train.report.rows_read == 2


def test_no_source_names_the_key():
    with pytest.raises(ConfigError, match=r"data\.train names no data"):
        load_prompts(DataConfig().train, DataConfig(), word_tokenizer())


def test_fingerprint_tells_other_data():
    texts = (["w6", "w7"], ["w6", "w7"], ["w6", "w8"])
    first, again, other = (load_prompts(rows(*some), DataConfig(), word_tokenizer()) for some in texts)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_slices_and_prompt_ids_agree_with_the_encoder():
    data = load_prompts(rows("hi", "w6", "w7"), DataConfig(), word_tokenizer())
    assert [row.row_id for row in data[1:]] == [1, 2]
    assert all(list(row.prompt_ids) == encode_prompt(word_tokenizer(), row.prompt, DataConfig()) for row in data)


def test_rows_that_are_held_out_leave_training_and_are_named() -> None:
    tokenizer = word_tokenizer(chat_template=False)
    config = DataConfig(ground_truth_key=None)
    train = load_prompts([{"prompt": "hi"}, {"prompt": "w6"}, {"prompt": "hi"}], config, tokenizer)
    val = load_prompts([{"prompt": "hi"}], config, tokenizer, key="data.val")
    kept = train.without(val)
    assert [row.row_id for row in kept] == [1]
    assert [incident.row_id for incident in kept.report.dropped["also in data.val"]] == [0, 2]
    assert (kept.report.rows_read, kept.report.rows_kept) == (3, 1)
    with pytest.raises(DataError, match=r"all 1 rows of data.train are in data.val"):
        val.without(train)
