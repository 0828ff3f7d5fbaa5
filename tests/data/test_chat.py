import pytest
from tokenizers import processors

from tests.tiny import word_tokenizer
from verl.common.errors import ConfigError, DataError
from verl.data.chat import encode_prompt, render_prompt
from verl.data.config import DataConfig

HI = [{"role": "user", "content": "hi"}]
AUTO = DataConfig()
NEVER = DataConfig(chat="never")
TEMPLATE_WITHOUT_BOS = (
    "{% for m in messages %}[U] {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)


@pytest.mark.parametrize("add_bos", [True, False])
def test_template_writes_bos_once_whatever_the_tokenizer_adds(add_bos):
    tokenizer = word_tokenizer(add_bos=add_bos)
    assert encode_prompt(tokenizer, HI, AUTO) == [1, 3, 5, 4]
    assert encode_prompt(tokenizer, "hi", AUTO) == [1, 3, 5, 4]


@pytest.mark.parametrize("start", ["{{ bos_token }} ", "<s> {{ bos_token }} "])
def test_bos_is_single_for_templates_that_name_it(start):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = start + TEMPLATE_WITHOUT_BOS
    assert encode_prompt(tokenizer, HI, AUTO) == [1, 3, 5, 4]


def test_a_template_without_bos_stays_without():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE_WITHOUT_BOS
    assert encode_prompt(tokenizer, HI, AUTO) == [3, 5, 4]


@pytest.mark.parametrize("text", ["hi w6", "<s> hi w6", "<s> <s> hi w6"])
def test_plain_text_gets_the_tokenizers_bos_once(text):
    assert encode_prompt(word_tokenizer(), text, NEVER) == [1, 5, 6]
    assert encode_prompt(word_tokenizer(chat_template=False), text, AUTO) == [1, 5, 6]


def test_plain_text_without_bos_tokenizer():
    assert encode_prompt(word_tokenizer(add_bos=False), "hi w6", NEVER) == [5, 6]


def test_plain_text_does_not_end_with_the_tokenizers_eos():
    tokenizer = word_tokenizer(add_bos=False)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert encode_prompt(tokenizer, "hi w6", NEVER) == [1, 5, 6]
    assert encode_prompt(tokenizer, "hi w6 </s>", NEVER) == [1, 5, 6, 2]


def test_truncation_saved_in_a_tokenizer_does_not_cut_prompts():
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.model_max_length = 2
    assert encode_prompt(tokenizer, "hi w6 w7 w8", NEVER) == [1, 5, 6, 7, 8]
    assert encode_prompt(tokenizer, HI, AUTO) == [1, 3, 5, 4]


def test_system_prompt_goes_first_unless_the_row_has_one():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}={{ m['content'] }};{% endfor %}"
    config = DataConfig(system_prompt="w9")
    assert render_prompt(tokenizer, "hi", config) == "system=w9;user=hi;"
    assert render_prompt(tokenizer, HI, config) == "system=w9;user=hi;"
    own = [{"role": "system", "content": "w8"}, *HI]
    assert render_prompt(tokenizer, own, config) == "system=w8;user=hi;"


def test_prompt_template_wraps_text_and_the_last_user_message():
    config = DataConfig(prompt_template="w7 {prompt} w8")
    turns = [*HI, {"role": "assistant", "content": "w6"}, {"role": "user", "content": "{w9} hi"}]
    assert render_prompt(word_tokenizer(), turns, config) == "<s> [U] hi [A] w6 </s> [U] w7 {w9} hi w8 [A]"
    assert render_prompt(word_tokenizer(chat_template=False), "hi {x}", config) == "w7 hi {x} w8"
    assert turns[2]["content"] == "{w9} hi"


def test_chat_template_kwargs_reach_the_template():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}w9 {% endfor %}hi{% if thinking %} w6{% endif %}"
    config = DataConfig(chat_template_kwargs={"thinking": True, "tools": [{"type": "function"}, {"type": "function"}]})
    assert encode_prompt(tokenizer, HI, config) == [9, 9, 5, 6]
    assert encode_prompt(tokenizer, HI, AUTO) == [5]


def test_messages_without_a_template_name_folder_and_key():
    tokenizer = word_tokenizer(chat_template=False)
    tokenizer.name_or_path = "models/base"
    with pytest.raises(ConfigError, match=r"'models/base' has no chat template.*data\.prompt_key"):
        encode_prompt(tokenizer, HI, AUTO)
    with pytest.raises(ConfigError, match=r"data\.chat is 'always'.*'models/base'"):
        encode_prompt(tokenizer, "hi", DataConfig(chat="always"))
    with pytest.raises(ConfigError, match=r"data\.chat = 'never'"):
        encode_prompt(tokenizer, HI, NEVER)
    with pytest.raises(ConfigError, match=r"data\.system_prompt needs a chat template.*data\.prompt_template"):
        encode_prompt(tokenizer, "hi", DataConfig(system_prompt="w9"))


def test_a_template_that_refuses_is_quoted():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"refuses roles \['user'\]: no system role"):
        encode_prompt(tokenizer, HI, AUTO)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (5, "got int 5"),
        (None, "got NoneType None"),
        ({"role": "user", "content": "hi"}, "got dict"),
        ("  ", "is empty"),
        ("hi \ud83d", r"holds '\\ud83d', half of a character"),
        ([{"role": "user", "content": "\udc00"}], r"holds '\\udc00', half of a character"),
        ([], "empty list"),
        (["hi"], r"message 0 must be \{role, content\}, got str 'hi'"),
        ([{}], "message 0 needs a role"),
        ([*HI, {"role": "user"}], "message 1 needs content that is text, got NoneType"),
        ([{"role": "user", "content": [1]}], "got list"),
        ([*HI, {"role": "assistant", "content": "w6"}], "ends with an assistant message"),
    ],
)
def test_what_is_no_prompt_is_described(prompt, said):
    with pytest.raises(DataError, match=said):
        encode_prompt(word_tokenizer(), prompt, AUTO)


def test_null_keys_of_messages_are_not_shown_to_the_template():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{% if 'name' in m %}w9 {% endif %}{{ m['content'] }}{% endfor %}"
    assert encode_prompt(tokenizer, [{"role": "user", "content": "hi", "name": None}], AUTO) == [5]
    call = [*HI, {"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "tool", "content": " w6"}]
    assert encode_prompt(tokenizer, call, AUTO) == [5, 6]
