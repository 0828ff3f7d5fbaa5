import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import word_tokenizer
from verl.common.errors import ConfigError
from verl.rollout.native.stop_strings import StopStrings


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token: characters outside ASCII straddle tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def first_end(stop: StopStrings, ids: list[int], start: int = 0) -> int | None:
    """Tokens up to the one that completes a string."""
    return next((n for n in range(start + 1, len(ids) + 1) if stop.completed_by_last(ids[:n], start)), None)


@pytest.mark.parametrize(
    ("strings", "text", "kept"),
    [
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo\n\n"),
        (["END"], "EEND EN", "EEND"),
        (["END", "two"], "one two END", "one two"),
        (["né"], "on né x", "on né"),
        (["日本"], "x日日本y", "x日日本"),
        (["🙂"], "a🙂b", "a🙂"),
        (["zz"], "z z z", None),
        (["ab" * 20], "b" + "ab" * 25, "b" + "ab" * 20),
    ],
)
def test_ends_at_the_token_that_completes_a_string(strings: list[str], text: str, kept: str | None) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert first_end(StopStrings(tokenizer, strings), ids) == (None if kept is None else len(kept.encode()))


def test_the_prompts_text_does_not_count() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("say END. END")["input_ids"]
    stop = StopStrings(tokenizer, ["END"])
    assert first_end(stop, ids, start=7) == 12
    assert first_end(stop, ids, start=6) == 12  # "E" and "N" of the prompt, "D" of the response
    assert first_end(stop, ids, start=10) is None


def test_an_older_match_is_not_found_again() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("END. x")["input_ids"]
    stop = StopStrings(tokenizer, ["END"])
    assert [n for n in range(1, 7) if stop.completed_by_last(ids[:n], 0)] == [3]


def test_words_and_special_tokens_are_text_too() -> None:
    tokenizer = word_tokenizer()
    assert first_end(StopStrings(tokenizer, ["hi w7"]), [6, 5, 7, 8]) == 3
    assert first_end(StopStrings(tokenizer, ["</s>"]), [6, 2, 7]) == 2
    assert first_end(StopStrings(tokenizer, ["w1"]), [6, 10, 7]) == 2


def test_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="stop_token_ids"):
        StopStrings(None, ["a"])
