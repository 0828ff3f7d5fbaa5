from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import word_tokenizer
from verl.common.errors import DataError, VerlError
from verl.data.chat import encode_prompt
from verl.data.examples import ExampleDataset
from verl.data.preferences import PreferenceDataConfig, load_preferences

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k" / "example_model_solutions.jsonl"
TOKENIZER = word_tokenizer()
PLAIN = word_tokenizer(chat_template=False)
PAIR = {"prompt": "hi w6", "chosen": "w7 w8", "rejected": "w9"}


def pairs(rows: list[dict[str, Any]], tokenizer: Any = PLAIN, **keys: Any) -> ExampleDataset:
    return load_preferences(rows, PreferenceDataConfig(**keys), tokenizer, is_paired=True)


def singles(rows: list[dict[str, Any]], tokenizer: Any = PLAIN, **keys: Any) -> ExampleDataset:
    return load_preferences(rows, PreferenceDataConfig(**keys), tokenizer, is_paired=False)


def test_a_pair_of_texts_shares_its_prompt_and_ends_both_answers() -> None:
    (example,) = pairs([PAIR])
    assert [answer.prompt_ids for answer in example.answers] == [(1, 5, 6), (1, 5, 6)]
    assert [answer.response_ids for answer in example.answers] == [(7, 8, 2), (9, 2)]
    assert [answer.response_mask for answer in example.answers] == [(True,) * 3, (True,) * 2]
    assert example.is_chosen == (True, False)


def test_chat_is_rendered_once_as_for_a_rollout() -> None:
    messages = [{"role": "user", "content": "hi"}]
    (example,) = pairs([{"prompt": messages, "chosen": "w7", "rejected": "w8 w9"}], TOKENIZER)
    assert example.prompt_ids == (1, 3, 5, 4)
    assert list(example.prompt_ids) == encode_prompt(TOKENIZER, messages, PreferenceDataConfig())
    assert [answer.response_ids for answer in example.answers] == [(7, 2), (8, 9, 2)]


@pytest.mark.parametrize("with_prompt", [True, False])
def test_answers_may_be_messages(with_prompt: bool) -> None:
    prompt = [{"role": "user", "content": "hi"}]
    row = {
        "prompt": "hi",
        "chosen": [*(prompt if with_prompt else []), {"role": "assistant", "content": "w7"}],
        "rejected": [{"role": "assistant", "content": "w8"}],
    }
    assert pairs([row], TOKENIZER)[0].answers == pairs([{**PAIR, "prompt": "hi", "chosen": "w7", "rejected": "w8"}],
        TOKENIZER)[0].answers  # fmt: skip


def test_columns_have_the_names_that_the_section_says() -> None:
    row = {"q": "hi", "answers": {"good": "w7", "bad": "w8"}}
    (example,) = pairs([row], prompt_key="q", chosen_key="answers.good", rejected_key="answers.bad")
    assert [answer.response_ids for answer in example.answers] == [(7, 2), (8, 2)]
    (single,) = singles([{"q": "hi", "a": "w7", "ok": 0}], prompt_key="q", response_key="a", label_key="ok")
    assert single.is_chosen == (False,) and len(single.answers) == 1


def test_judged_columns_make_every_pair_of_a_right_and_a_wrong_answer() -> None:
    row = {"prompt": "hi"} | {
        name: {"solution": word, "is_correct": ok} for name, word, ok in
        (("a", "w7", True), ("b", "w8", False), ("c", "w9", True), ("d", "w10", False))
    }  # fmt: skip
    keys: dict[str, Any] = {"judged_keys": [*"abcd"], "response_key": "solution", "label_key": "is_correct"}
    found = [tuple(answer.response_ids[0] for answer in example.answers) for example in pairs([row], **keys)]
    assert found == [(7, 8), (7, 10), (9, 8), (9, 10)]
    assert [(e.answers[0].response_ids[0], e.is_chosen[0]) for e in singles([row], **keys)] == [
        (7, True), (8, False), (9, True), (10, False)
    ]  # fmt: skip
    alike = {**row, "b": row["a"], "d": row["a"]}
    both = pairs([row, alike], **keys)
    assert len(both) == 4 and "1 dropped (no pair)" in both.report.summary()


JUDGED: dict[str, Any] = {"judged_keys": [*"abc"]}


def judged(prompt: str, *answers: Any) -> dict[str, Any]:
    """A row of three answers, of which only the first is desirable."""
    cells = zip("abc", answers, (True, False, False), strict=True)
    return {"prompt": prompt} | {key: {"response": answer, "label": label} for key, answer, label in cells}


def test_every_example_of_a_row_is_kept_cut_or_dropped_by_itself() -> None:
    alike = judged("hi", "w7", "w8", "w8")
    alike["a"]["label"] = False
    rows = [alike, judged("hi w6", "w7", "w8", "w9 w9 w9 w9 w9"), judged("hi", "w7", "w8", "w9")]
    found = pairs(rows, **JUDGED, max_example_tokens=6)
    assert [example.row_id for example in found] == [1, 2, 2]
    assert found.report.summary() == (
        "read 3 rows, kept 3; 1 dropped (overlong): rows[1] (prompt and answer have 9 tokens, limit 6 "
        "(data.max_example_tokens)); 1 dropped (no pair): rows[0] (its answers are all of one label)"
    )
    cut = pairs(rows, **JUDGED, max_example_tokens=6, overlong_examples="right")
    assert [example.row_id for example in cut] == [1, 1, 2, 2]
    assert cut.report.summary() == (
        "read 3 rows, kept 4; 1 dropped (no pair): rows[0] (its answers are all of one label); 1 cut: rows[1] (prompt "
        "and answer have 9 tokens)"
    )


def test_every_answer_that_is_none_is_named_before_examples_that_are_too_long() -> None:
    rows = [judged("hi", "w7", 5, ""), judged("hi", "w7", "w8 w8 w8", "w9 w9 w9 w9"), {"prompt": "hi"}]
    keys = {**JUDGED, "max_example_tokens": 5, "max_prompt_tokens": 3, "overlong_examples": "error"}
    with pytest.raises(DataError) as error:
        pairs(rows, **keys)
    assert str(error.value) == (
        "data.train: 3 of 3 rows can't be used. Mend or remove these rows:\n"
        "  rows[0] (row 0): a prompt is text or a list of {role, content} messages, got int 5\n"
        "  rows[0] (row 0): the answer is empty\n"
        "  rows[2] (row 2): column 'a' (data.judged_keys) isn't in the row; the row has 'prompt'"
    )
    rows = [*rows[1:2], judged("hi w6 w7", "w7", "w8", "w9")]
    with pytest.raises(DataError) as error:
        pairs(rows, **keys)
    assert str(error.value) == (
        "data.train: 2 of 2 rows can't be used. Raise the limit, or set data.overlong_prompts or "
        "data.overlong_examples to drop or right:\n"
        "  rows[0] (row 0): prompt and answer have 6 tokens, limit 5 (data.max_example_tokens)\n"
        "  rows[0] (row 0): prompt and answer have 7 tokens, limit 5 (data.max_example_tokens)"
    )
    with pytest.raises(DataError) as error:
        pairs(rows[1:], **keys)
    assert str(error.value) == (
        "data.train: no example is left to learn from: read 1 rows, kept 0; 2 dropped (overlong): rows[0] (its prompt "
        "has 4 tokens, limit 3 (data.max_prompt_tokens)), rows[0] (its prompt has 4 tokens, limit 3 "
        "(data.max_prompt_tokens))"
    )


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({"max_prompt_tokens": 3}, [(1, 5, 6)]),
        ({"max_prompt_tokens": 3, "overlong_prompts": "left"}, [(1, 5, 6), (6, 7, 8)]),
        ({"max_prompt_tokens": 3, "overlong_prompts": "right"}, [(1, 5, 6), (1, 5, 6)]),
    ],
)
def test_long_prompts_are_cut_the_same_on_both_sides(keys: dict[str, Any], left: list[tuple[int, ...]]) -> None:
    found = pairs([PAIR, {**PAIR, "prompt": "hi w6 w7 w8"}], **keys)
    assert [example.answers[0].prompt_ids for example in found] == left
    assert [example.answers[1].prompt_ids for example in found] == left
    assert [example.answers[0].response_ids for example in found] == [(7, 8, 2)] * len(left)


def test_a_pair_with_one_long_answer_leaves_whole_or_is_cut() -> None:
    rows = [PAIR, {**PAIR, "rejected": "w9 w9 w9 w9"}]
    found = pairs(rows, max_example_tokens=6)
    assert found.report.summary() == (
        "read 2 rows, kept 1; 1 dropped (overlong): rows[1] (prompt and answer have 8 tokens, limit 6 "
        "(data.max_example_tokens))"
    )
    cut = pairs(rows, max_example_tokens=6, overlong_examples="right")
    assert [answer.response_ids for answer in cut[1].answers] == [(7, 8, 2), (9, 9, 9)]
    assert cut.report.summary() == "read 2 rows, kept 2; 1 cut: rows[1] (prompt and answer have 8 tokens)"
    with pytest.raises(
        DataError, match=r"1 of 2 rows can't be used.*\n.*rows\[1\] \(row 1\): .* have 8 tokens, limit 6"
    ):
        pairs(rows, max_example_tokens=6, overlong_examples="error")
    with pytest.raises(DataError, match="no example is left"):
        pairs(rows, max_example_tokens=3)


@pytest.mark.parametrize("limit", [3, 4])
def test_an_example_that_is_cut_to_its_prompt_is_dropped(limit: int) -> None:
    found = singles(
        [{"prompt": "hi w6 w7", "response": "w7", "label": 1}, {"prompt": "hi", "response": "w8", "label": 1}],
        max_example_tokens=limit, overlong_examples="right",
    )  # fmt: skip
    assert [(example.row_id, len(example)) for example in found] == [(1, limit)]
    assert (
        f"1 dropped (overlong): rows[0] (no token of an answer is within the limit of {limit}" in found.report.summary()
    )


def test_the_limit_of_an_example_is_on_what_is_left_of_its_prompt() -> None:
    rows = [{**PAIR, "prompt": "hi w6 w7 w8"}]
    (example,) = pairs(rows, max_prompt_tokens=3, overlong_prompts="left", max_example_tokens=6)
    assert [len(answer) for answer in example.answers] == [6, 5]
    for keys in ({}, {"max_prompt_tokens": 4, "overlong_prompts": "left"}):
        with pytest.raises(DataError, match="no example is left"):
            pairs(rows, max_example_tokens=6, **keys)


def test_a_long_prompt_may_be_an_error() -> None:
    with pytest.raises(DataError, match="its prompt has 3 tokens, limit 2"):
        pairs([PAIR], max_prompt_tokens=2, overlong_prompts="error")


def test_an_equal_pair_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(pairs([PAIR, {**PAIR, "rejected": "w7 w8"}])) == 2
    assert "1 pairs teach nothing" in caplog.text and "row 1" in caplog.text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "hi", "chosen": "w7"}, r"column 'rejected' \(data.rejected_key\)"),
        ({"prompt": "hi", "chosen": "", "rejected": "w7"}, "the answer is empty"),
        ({"chosen": "w8", "rejected": "w7"}, "data.prompt_key"),
        ({"prompt": "hi", "chosen": 5, "rejected": "w7"}, "got int 5"),
        ({"prompt": "hi", "chosen": [{"role": "user", "content": "x"}], "rejected": "w7"}, r"the roles \['user'\]"),
    ],
)
def test_rows_that_are_no_pairs_are_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(VerlError, match=words):
        pairs([PAIR, row])


@pytest.mark.parametrize(("label", "word"), [(True, "desirable"), (False, "undesirable")])
def test_answers_of_one_label_are_warned_of(caplog: pytest.LogCaptureFixture, label: bool, word: str) -> None:
    rows = [{"prompt": f"hi w{i}", "response": "w7", "label": label} for i in (10, 11, 12)]
    assert len(singles(rows)) == 3
    assert f"data.train: all 3 answers are {word}, and there is no" in caplog.text
    caplog.clear()
    assert len(singles([*rows, {**rows[0], "label": not label}])) == 4 and not caplog.text
    assert len(pairs([PAIR])) == 1 and not caplog.text


@pytest.mark.parametrize("label", ["yes", 2, 0.5])
def test_a_label_is_true_or_false(label: Any) -> None:
    with pytest.raises(DataError, match=r"column 'label' \(data.label_key\) is true or false"):
        singles([{"prompt": "hi", "response": "w7", "label": label}])


@pytest.mark.skipif(not GSM8K.is_file(), reason="the data set isn't beside the checkout")
def test_solutions_to_gsm8k_make_pairs_and_single_answers() -> None:
    from verl.models.loading import character_tokenizer

    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    tokenizer = character_tokenizer("".join(sorted(set(json.dumps(rows, ensure_ascii=False)) | {"\n"})))
    models = [f"{size}_{kind}" for size in ("6b", "175b") for kind in ("finetuning", "verification")]
    config = PreferenceDataConfig(
        prompt_key="question", judged_keys=models, response_key="solution", label_key="is_correct",
        max_prompt_tokens=4096, max_example_tokens=8192,
    )  # fmt: skip
    found = load_preferences(GSM8K, config, tokenizer, is_paired=False, max_rows=50)
    assert len(found) == 200 and 0 < sum(example.is_chosen[0] for example in found) < 200
    by_row = [[e.is_chosen[0] for e in found if e.row_id == row] for row in range(50)]
    expected = sum(sum(labels) * (len(labels) - sum(labels)) for labels in by_row)
    assert len(load_preferences(GSM8K, config, tokenizer, is_paired=True, max_rows=50)) == expected > 0
