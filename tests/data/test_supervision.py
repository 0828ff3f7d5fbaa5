import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import word_tokenizer
from verl.common.errors import ConfigError, DataError
from verl.data.chat import encode_prompt
from verl.data.config import DataConfig
from verl.data.supervision import Supervised, supervise

CONFIG = DataConfig()
HI = {"role": "user", "content": "hi"}
TURNS = [HI, {"role": "assistant", "content": "w20 w21"}, {"role": "user", "content": "w9"}]
TURNS = [*TURNS, {"role": "assistant", "content": "w22"}]
BODY = (
    "<s> {% for m in messages %}{% if m['role'] == 'assistant' %}[A] BLOCK"
    "{% else %}[U] {{ m['content'] }} {% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)
BLOCKS = {
    "end inside": "{% generation %}{{ m['content'] }} </s>{% endgeneration %} ",
    "end outside": "{% generation -%}{{ m['content'] }}{%- endgeneration -%} {{ ' </s> ' }}",
}


def learned(example: Supervised) -> list[int]:
    return [token for token, flag in zip(example.input_ids, example.labels_mask, strict=True) if flag]


def tokenizer_with(block: str | None):
    tokenizer = word_tokenizer()
    if block is not None:
        tokenizer.chat_template = BODY.replace("BLOCK", block)
    return tokenizer


def loss(example: Supervised, log_probs: torch.Tensor) -> torch.Tensor:
    """Mean over the labels, by the stated rule: the label at t is token t, scored by the output at t - 1."""
    ids, mask = torch.tensor(example.input_ids), torch.tensor(example.labels_mask)
    picked = log_probs[:-1].gather(1, ids[1:, None])[:, 0]
    return -picked[mask[1:]].mean()


def test_plain_answer_and_its_eos_are_learned():
    tokenizer = word_tokenizer(add_bos=False, chat_template=False)
    example = supervise(tokenizer, "w10 w11 w12", CONFIG, answer="w20 w21")
    assert example.input_ids == (10, 11, 12, 20, 21, 2)
    assert example.labels_mask == (False, False, False, True, True, True)
    uniform = torch.full((6, 50), -math.log(50))
    assert loss(example, uniform).item() == pytest.approx(3.912023, abs=1e-6)
    by_label = -torch.arange(50.0).expand(6, 50)
    assert loss(example, by_label).item() * 3 == pytest.approx(43)


def test_the_prompt_part_is_what_rollout_sees():
    for tokenizer in (word_tokenizer(chat_template=False), word_tokenizer()):
        ids = encode_prompt(tokenizer, "hi w6", CONFIG)
        example = supervise(tokenizer, "hi w6", CONFIG, answer="w20")
        assert list(example.input_ids) == [*ids, 20, 2]
        assert learned(example) == [20, 2]


def test_an_answer_that_ends_itself_gets_no_second_eos():
    example = supervise(word_tokenizer(chat_template=False), "hi", CONFIG, answer="w20 </s>")
    assert example.input_ids == (1, 5, 20, 2)


@pytest.mark.parametrize("block", [None, *BLOCKS.values()], ids=["prefixes", *BLOCKS])
def test_every_assistant_turn_and_its_end_is_learned(block):
    example = supervise(tokenizer_with(block), TURNS, CONFIG)
    assert example.input_ids == (1, 3, 5, 4, 20, 21, 2, 3, 9, 4, 22, 2)
    assert [t for t, flag in enumerate(example.labels_mask) if flag] == [4, 5, 6, 10, 11]
    assert learned(example) == [20, 21, 2, 22, 2]


@pytest.mark.parametrize("block", [None, *BLOCKS.values()], ids=["prefixes", *BLOCKS])
def test_messages_with_an_answer_learn_the_answer_only(block):
    template = None if block is None else block
    example = supervise(tokenizer_with(template), [HI], CONFIG, answer="w20")
    assert example.input_ids == (1, 3, 5, 4, 20, 2) and learned(example) == [20, 2]


def test_system_and_tool_turns_are_not_learned():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "<s> {% for m in messages %}{% if m['role'] == 'assistant' %}[A] {{ m['content'] }} </s> "
        "{% else %}[U] {{ m['content'] }} </s> {% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    )
    turns = [*TURNS[:2], {"role": "tool", "content": "w30 w31"}, {"role": "assistant", "content": "w22"}]
    example = supervise(tokenizer, turns, DataConfig(system_prompt="w40"))
    assert example.input_ids == (1, 3, 40, 2, 3, 5, 2, 4, 20, 21, 2, 3, 30, 31, 2, 4, 22, 2)
    assert learned(example) == [20, 21, 2, 22, 2]
    assert example.labels_mask.index(True) == 8


def chatml_tokenizer():
    """Byte-level BPE with ChatML, where a line break follows each end token and two of them are one token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=280,
        show_progress=False,
    )
    inner.train_from_iterator(["user assistant a\n\n\nb"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return tokenizer


def test_what_follows_the_end_token_is_not_learned():
    tokenizer = chatml_tokenizer()
    turns = [HI, {"role": "assistant", "content": " yes \n\n"}, HI, {"role": "assistant", "content": "42"}]
    example = supervise(tokenizer, turns, CONFIG)
    assert tokenizer.decode(learned(example)) == " yes \n\n<|im_end|>42<|im_end|>"
    assert list(example.input_ids[: example.labels_mask.index(True)]) == encode_prompt(tokenizer, [HI], CONFIG)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n yes \n\n<|im_end|>\n"
    assert tokenizer.decode(example.input_ids).startswith(text)


def test_an_answer_that_melts_into_the_prompt_is_refused():
    with pytest.raises(DataError, match=r"make one token together.*remove white space"):
        supervise(chatml_tokenizer(), [HI], CONFIG, answer="\n\nyes")


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}[A] {% if loop.last %}w60 {% endif %}"
        "{{ m['content'] }} </s> {% else %}[U] {{ m['content'] }} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[A]{% endif %}"
    )
    with pytest.raises(DataError, match=r"beginning differently when more follows.*generation"):
        supervise(tokenizer, TURNS, CONFIG)
    assert learned(supervise(tokenizer, TURNS[:2], CONFIG)) == [60, 20, 21, 2]


@pytest.mark.parametrize(
    ("prompt", "answer", "said"),
    [
        ("hi", None, "a text prompt needs its answer"),
        ([HI], None, r"no assistant turn to learn: the roles are \['user'\]"),
        ([], None, "empty list"),
        (TURNS, "w20", "ends with an assistant message"),
    ],
)
def test_examples_without_an_answer_are_refused(prompt, answer, said):
    with pytest.raises(DataError, match=said):
        supervise(word_tokenizer(), prompt, CONFIG, answer=answer)


def test_an_empty_plain_answer_is_refused():
    with pytest.raises(DataError, match="the answer is empty"):
        supervise(word_tokenizer(chat_template=False), "hi", CONFIG, answer=" ")


def test_an_empty_answer_is_refused_in_a_chat_too():
    with pytest.raises(DataError, match="the answer is empty"):
        supervise(word_tokenizer(), "hi", CONFIG, answer="")
    with pytest.raises(DataError, match="message 1, an assistant turn, is empty"):
        supervise(word_tokenizer(), [HI, {"role": "assistant", "content": ""}, *TURNS[2:]], CONFIG)


def test_a_turn_that_only_calls_tools_is_no_empty_one():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert learned(supervise(word_tokenizer(), [HI, call], CONFIG)) == [2]


def test_turns_need_a_template():
    with pytest.raises(ConfigError, match="has no chat template"):
        supervise(word_tokenizer(chat_template=False), TURNS, CONFIG)
