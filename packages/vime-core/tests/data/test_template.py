from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from vime_core.data import Example, Message
from vime_core.data.files import ExampleList
from vime_core.data.template import PromptRenderer, PromptTooLong, load_tokenizer, usable_examples
from vime_core.errors import DataError, PluginError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if quiet %}hush{% endif %}{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]})
    bos = ("<bos>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> Example:
    return Example((Message("user", text),), "1")


def test_it_is_the_tokenizer_s_own_template() -> None:
    tokenizer = make_tokenizer()
    rendered = PromptRenderer(tokenizer, max_tokens=100, system_prompt="Kurz, bitte: ü.").render(user("2 + 3?"), 0)
    conversation = [{"role": "system", "content": "Kurz, bitte: ü."}, {"role": "user", "content": "2 + 3?"}]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert list(rendered.token_ids) == expected
    assert rendered.text == "<|system|>Kurz, bitte: ü.<|end|><|user|>2 + 3?<|end|><|assistant|>"
    assert tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == rendered.text


def test_without_system_prompt_only_the_messages() -> None:
    assert PromptRenderer(make_tokenizer(), 100).render(user("hi"), 0).text == "<|user|>hi<|end|><|assistant|>"


def test_template_arguments_reach_the_template() -> None:
    renderer = PromptRenderer(make_tokenizer(), 100, template_arguments={"quiet": True})
    assert renderer.render(user("hi"), 0).text.endswith("<|assistant|>hush")


def test_without_a_template_contents_are_joined() -> None:
    tokenizer = make_tokenizer(template=None)
    rendered = PromptRenderer(tokenizer, 100, system_prompt="Add.").render(user("2 + 3 ="), 0)
    assert rendered.text == "Add.\n2 + 3 ="
    assert list(rendered.token_ids) == tokenizer.encode("Add.\n2 + 3 =")
    assert rendered.token_ids.count(tokenizer.bos_token_id) == 1


def test_a_prompt_that_just_fits_and_one_that_does_not() -> None:
    tokenizer = make_tokenizer()
    length = len(PromptRenderer(tokenizer, 100).render(user("hello"), 0).token_ids)
    assert PromptRenderer(tokenizer, length).render(user("hello"), 7)
    with pytest.raises(PromptTooLong) as caught:
        PromptRenderer(tokenizer, length - 1).render(user("hello"), 7)
    assert f"example 7 has {length} tokens, more than the {length - 1}" in caught.value.message
    assert "data.overlong = 'drop'" in caught.value.remedy
    assert caught.value.code == "VIME-DATA-008"


def test_dropping_long_prompts_counts_them() -> None:
    dataset = ExampleList(tuple(user("x" * n) for n in (1, 50, 2, 60)))
    usable = usable_examples(dataset, PromptRenderer(make_tokenizer(), 20))
    assert (usable.kept, usable.dropped) == ((0, 2), (1, 3))


def test_dropping_everything_is_an_error() -> None:
    dataset = ExampleList((user("x" * 50),))
    with pytest.raises(DataError, match="all 1 prompts are longer than 20"):
        usable_examples(dataset, PromptRenderer(make_tokenizer(), 20))


def test_dropping_hides_no_other_fault() -> None:
    example = Example((Message("tool", "?"),), "1")
    with pytest.raises(DataError, match=r"refuses example 1.*no tools here"):
        usable_examples(ExampleList((user("fine"), example)), PromptRenderer(make_tokenizer(), 20))


def test_two_system_prompts_contradict() -> None:
    example = replace(user("hi"), messages=(Message("system", "A."), Message("user", "hi")))
    with pytest.raises(DataError, match="example 4 brings a system message"):
        PromptRenderer(make_tokenizer(), 100, system_prompt="B.").render(example, 4)


def test_a_prompt_without_tokens() -> None:
    with pytest.raises(DataError, match="example 3 has no tokens"):
        PromptRenderer(make_tokenizer(template="{{ messages[0].content }}"), 100).render(user(""), 3)


def test_a_saved_tokenizer_loads_the_same(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    loaded = PromptRenderer(load_tokenizer(tmp_path), 100).render(user("hi"), 0)
    assert loaded == PromptRenderer(make_tokenizer(), 100).render(user("hi"), 0)


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_directory_without_a_tokenizer(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PluginError) as caught:
        load_tokenizer(tmp_path)
    assert "pip install 'vime-core[data]'" in caught.value.remedy


def test_a_long_prompt_is_our_error_and_no_warning_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 16  # as a model directory says
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    for load, warns in ((load_tokenizer, False), (transformers.AutoTokenizer.from_pretrained, True)):
        caplog.clear()
        PromptRenderer(load(tmp_path), max_tokens=600).render(user("a" * 500), 0)
        assert ("longer than the specified maximum" in caplog.text) is warns
