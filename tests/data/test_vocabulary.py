from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl.common.errors import DataError
from verl.data.chat import encode_prompt
from verl.data.config import DataConfig
from verl.data.demonstrations import DemonstrationDataConfig, load_demonstrations
from verl.data.preferences import PreferenceDataConfig, load_preferences
from verl.data.prompts import load_prompts
from verl.data.vocabulary import UnknownText, check_known, warn_of_unknown
from verl.models.loading import character_tokenizer

DIGITS = character_tokenizer("0123456789+=")
CONFIG = DataConfig(ground_truth_key=None)


def own_unknown(model: str) -> PreTrainedTokenizerFast:
    """A tokenizer of letters a and b with ``<unk>``=0 of its own, ``</s>``=1; ``model`` is that of old BERT or T5."""
    tokens = ["<unk>", "</s>", "a", "b", "##a", "##b", "\u2581"]
    if model == "WordPiece":
        inner = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        inner = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=0))
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def no_unknown() -> PreTrainedTokenizerFast:
    """Bytes, as most models have them now."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def test_characters_that_are_in_no_vocabulary_are_named_with_rows_and_key() -> None:
    with pytest.raises(DataError) as error:
        load_prompts([{"prompt": p} for p in ("1+2=", "1-2=", "1+2=", "x-y")], CONFIG, DIGITS, key="data.val")
    assert str(error.value) == (
        "data.val: 2 of 4 rows can't be used. Mend or remove these rows, or set model.tokenizer, now "
        "'chars:0123456789+=', to one that knows '-', 'x', 'y' (it reads '<pad>' in their place):\n"
        "  rows[1] (row 1): the tokenizer has no token for '-'\n"
        "  rows[3] (row 3): the tokenizer has no token for 'x', '-', 'y'"
    )


def test_text_around_the_prompt_is_checked_with_it() -> None:
    config = DataConfig(ground_truth_key=None, prompt_template="Q{prompt}")
    with pytest.raises(DataError, match=r"1 of 1 rows(.|\n)*no token for 'Q'$"):
        load_prompts([{"prompt": "1+2="}], config, DIGITS)


def test_rows_at_fault_in_other_ways_are_named_beside_them() -> None:
    with pytest.raises(DataError, match=r"2 of 2 rows .*knows '\?' (.|\n)*row 0.*'\?'\n.*row 1.*got int 5$"):
        load_prompts([{"prompt": "1?"}, {"prompt": 5}], CONFIG, DIGITS)


def test_answers_are_checked_as_prompts_are() -> None:
    rows = [{"prompt": "1+2=", "response": "3"}, {"prompt": "1+2=", "response": "4!"}, {"prompt": "?", "response": "3"}]
    with pytest.raises(DataError, match=r"2 of 3 rows .*knows '!', '\?' (.|\n)*row 1.*'!'\n.*row 2.*'\?'$"):
        load_demonstrations(rows, DemonstrationDataConfig(), DIGITS)
    pair = {"prompt": "1+2=", "chosen": "3", "rejected": "four"}
    with pytest.raises(DataError, match=r"1 of 1 rows(.|\n)*no token for 'f', 'o', 'u', 'r'$"):
        load_preferences([pair], PreferenceDataConfig(), DIGITS, is_paired=True)


def test_every_piece_of_many_is_counted() -> None:
    text = "".join(map(chr, range(ord("A"), ord("A") + 120)))
    with pytest.raises(UnknownText, match=r"no token for 'A', 'B', .* 'J' and 110 more$") as error:
        encode_prompt(DIGITS, text, CONFIG)
    assert error.value.pieces == tuple(text)
    with pytest.raises(DataError, match=r"knows 'A', .* and 20 more \(it reads '<pad>'"):
        load_prompts([{"prompt": text}], CONFIG, DIGITS)


def test_a_saved_character_tokenizer_is_one_still(tmp_path: Path) -> None:
    DIGITS.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    with pytest.raises(UnknownText, match=r"no token for 'x'$"):
        encode_prompt(loaded, "x=1", CONFIG)


@pytest.mark.parametrize("role", ["bos_token", "eos_token"])
def test_the_token_itself_is_no_unknown_text(role: str) -> None:
    """GPT-2 and its kin have one token for everything, and templates write it."""
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="<|endoftext|>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<|endoftext|>", **{role: "<|endoftext|>"}, pad_token="<|endoftext|>"
    )
    assert encode_prompt(made, "a<|endoftext|>a", CONFIG) == [1, 0, 1]
    made.chat_template = "<|endoftext|>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert encode_prompt(made, "aa", CONFIG) == [0, 1, 1]
    with pytest.raises(UnknownText, match=r"no token for 'b'$"):
        encode_prompt(made, "ab", CONFIG)


@pytest.mark.parametrize("model", ["WordPiece", "Unigram"])
def test_an_unknown_token_of_its_own_is_counted_and_let_through(model: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": p} for p in ("a b", "a c", "b", "c b c")]
    tokenizer = own_unknown(model)
    assert len(load_prompts(rows, CONFIG, tokenizer)) == 4
    (record,) = caplog.records
    ids = encode_prompt(tokenizer, "a c", CONFIG)
    assert record.levelno == logging.WARNING and record.getMessage() == (
        "data.train: 2 rows have text that the tokenizer '' doesn't know and reads as '<unk>', such as row 1 of rows: "
        f"1 of its {len(ids)} tokens"
    )
    caplog.clear()
    load_prompts([rows[0], rows[2]], CONFIG, tokenizer)
    assert not caplog.records


def test_rows_of_several_examples_are_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = own_unknown("WordPiece")
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "a", "rejected": "b"}]
    load_preferences(rows, PreferenceDataConfig(), tokenizer, is_paired=True)
    load_demonstrations([{"prompt": "a", "response": "c"}], DemonstrationDataConfig(), tokenizer)
    assert [record.getMessage()[:17] for record in caplog.records] == ["data.train: 1 row"] * 2
    assert caplog.records[0].getMessage().endswith("row 0 of rows: 1 of its 6 tokens")
    caplog.clear()
    warn_of_unknown(tokenizer, "data.train", [(3, "rows", (2, 0)), (3, "rows", (0, 0)), (4, "rows", (2, 3))])
    assert "1 rows have" in caplog.text


@pytest.mark.parametrize("tokenizer", [no_unknown(), DIGITS])
def test_tokenizers_without_unknown_tokens_are_left_alone(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    text = "1+2=" if tokenizer is DIGITS else "\u00e9 \u5b57 \U0001f600 \n"
    check_known(tokenizer, text, tokenizer(text)["input_ids"])
    warn_of_unknown(tokenizer, "data.train", [(0, "rows", tokenizer(text)["input_ids"])])
    assert load_prompts([{"prompt": text}], CONFIG, tokenizer)[0].prompt == text
    assert not caplog.records
