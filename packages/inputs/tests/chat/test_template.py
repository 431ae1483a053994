"""Chat templates: where they are read from, and what they may not do."""

import datetime
import json

import pytest

from layerkit.errors import UserError
from layerkit_inputs import ByteTokenizer, HuggingFaceTokenizer
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.chat.template import ChatTemplate, load_chat_template

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
CONFIG, FILE, RAG = (
    *("tokenizer_config.json", "chat_template.jinja"),
    "additional_chat_templates/rag.jinja",
)
NAMES = ("default", "tool_use", "rag")
VARIANTS = {CONFIG: {"chat_template": [{"name": name, "template": name} for name in NAMES]}}
FOLDERS = {
    "config": ({CONFIG: {"chat_template": "a"}}, None, "a"),
    "file before config": ({CONFIG: {"chat_template": "a"}, FILE: "b"}, None, "b"),
    "variants": (VARIANTS, None, "default"),
    "a variant": (VARIANTS, "rag", "rag"),
    "files of variants": ({FILE: "a", RAG: "b"}, "rag", "b"),
    "tokens": ({CONFIG: {"eos_token": "E"}, FILE: "{{ bos_token }}{{ eos_token }}"}, None, "E"),
}


@pytest.fixture
def write_tokenizer(tmp_path):
    """Return a function that writes files beside a tokenizer.json, and gives the tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")

    def write(files):
        model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "E": 1}, []))
        for name, text in {"tokenizer.json": model.to_str(), **files}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return HuggingFaceTokenizer(path=str(tmp_path))

    return write


@pytest.mark.parametrize(("files", "name", "text"), FOLDERS.values(), ids=FOLDERS)
def test_template_of_a_folder_is_that_of_transformers(files, name, text, write_tokenizer, tmp_path):
    assert load_chat_template(name, write_tokenizer(files)).render(MESSAGES) == text
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert text == reference.apply_chat_template(MESSAGES, chat_template=name, tokenize=False)


def test_tools_select_their_template(write_tokenizer):
    template = load_chat_template(None, write_tokenizer(VARIANTS))
    assert template.render(MESSAGES, tools=[]) == "tool_use"
    with pytest.raises(BadRecordError, match="it has no tools"):
        load_chat_template("chatml", ByteTokenizer()).render(MESSAGES, tools=[{"type": "function"}])


NO_TEMPLATE = {
    "a name": ("chatm", {}, "Did you mean 'chatml'"),
    "of the Hub": ("org/model", {}, "hf download org/model"),
    "of the folder": (None, {}, "the tokenizer's folder has no chat template"),
    "not Jinja": (None, {FILE: "{% if %}"}, "line 1: Expected an expression"),
    "not JSON": (None, {FILE: "a", CONFIG: "{"}, "line 1"),
    "no default": (None, {RAG: "a"}, "Choices: rag"),
}


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
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__self__.__reduce__() }}",
        "{{ namespace(__call__=range) }}",
        "{% set x = namespace() %}{% set x._y = 1 %}",
        "{{ [namespace()] | tojson(default=range) }}",
        "{{ (messages | attr('__class__')).x }}",
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
