"""Chat templates: where they are read from, and what they may not do."""

import datetime
import json

import pytest

from layerkit.errors import UserError
from layerkit_inputs import ByteTokenizer, HuggingFaceTokenizer
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.chat.template import ChatTemplate, load_chat_template

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
NAMES = ("default", "tool_use", "rag")
VARIANTS = json.dumps({"chat_template": [{"name": name, "template": name} for name in NAMES]})
FOLDERS = {
    "config": ({"tokenizer_config.json": json.dumps({"chat_template": "a"})}, None, "a"),
    "file before config": (
        {"tokenizer_config.json": json.dumps({"chat_template": "a"}), "chat_template.jinja": "b"},
        *(None, "b"),
    ),
    "variants": ({"tokenizer_config.json": VARIANTS}, None, "default"),
    "a variant": ({"tokenizer_config.json": VARIANTS}, "rag", "rag"),
    "files of variants": (
        {"chat_template.jinja": "a", "additional_chat_templates/rag.jinja": "b"}, "rag", "b"
    ),
    "tokens": (
        {
            "tokenizer_config.json": json.dumps({"eos_token": "</s>", "add_bos_token": True}),
            "chat_template.jinja": "{{ bos_token }}{{ eos_token }}",
        },
        *(None, "</s>"),
    ),
}  # fmt: skip


@pytest.fixture
def write_tokenizer(tmp_path):
    """Return a function that writes files beside a tokenizer.json, and gives the tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")

    def write(files):
        model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, []))
        model.save(str(tmp_path / "tokenizer.json"))
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return HuggingFaceTokenizer(path=str(tmp_path))

    return write


@pytest.mark.parametrize(("files", "name", "text"), FOLDERS.values(), ids=FOLDERS)
def test_template_of_a_folder_is_that_of_transformers(files, name, text, write_tokenizer, tmp_path):
    tokenizer = write_tokenizer(files)
    assert load_chat_template(name, tokenizer).render(MESSAGES) == text
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert text == reference.apply_chat_template(MESSAGES, chat_template=name, tokenize=False)


def test_tools_select_their_template(write_tokenizer):
    files = {"tokenizer_config.json": VARIANTS}
    template = load_chat_template(None, write_tokenizer(files))
    assert template.render(MESSAGES, tools=[]) == "tool_use"
    with pytest.raises(BadRecordError, match="it has no tools"):
        load_chat_template("chatml", ByteTokenizer()).render(MESSAGES, tools=[{"type": "function"}])


NO_TEMPLATE = {
    "a name": ("chatm", {}, "Did you mean 'chatml'"),
    "of the Hub": ("org/model", {}, "hf download org/model"),
    "of the folder": (None, {}, "the tokenizer's folder has no chat template"),
    "not Jinja": (None, {"chat_template.jinja": "{% if %}"}, "line 1: Expected an expression"),
    "not JSON": (None, {"chat_template.jinja": "a", "tokenizer_config.json": "{"}, "line 1"),
    "no default": (None, {"additional_chat_templates/rag.jinja": "a"}, "Choices: rag"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "files", "message"), NO_TEMPLATE.values(), ids=NO_TEMPLATE)
def test_missing_or_damaged_template_is_an_error(name, files, message, write_tokenizer):
    with pytest.raises(UserError) as error:
        load_chat_template(name, write_tokenizer(files)).render(MESSAGES)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__self__.__reduce__() }}",
        "{% set x = namespace(__call__=range) %}{{ x() }}",
        "{% set x = namespace() %}{% set x._y = 1 %}",
        "{{ [namespace()] | tojson(default=range) }}",
        "{{ (messages | attr('__class__')).x }}",
        "{{ raise_exception('No.') }}",
        "{{ 1 / 0 }}",
        "{% include 'a' %}",
        "{% for i in range(1000000) %}{% endfor %}",
    ],
)
def test_template_that_leaves_the_sandbox_or_fails_is_an_error(source):
    with pytest.raises(BadRecordError, match="cannot render"):
        ChatTemplate({"default": source}, {}).render(MESSAGES)


def test_time_of_a_template_is_fixed():
    source = {"default": "{{ strftime_now('%d %b %Y') }}"}
    template = ChatTemplate(source, {}, datetime.datetime(2024, 7, 26))
    assert template.render(MESSAGES) == "26 Jul 2024"
