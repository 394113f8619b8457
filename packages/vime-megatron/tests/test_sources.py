from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from vime_core.errors import ConfigError
from vime_megatron.sources.cache import make_once
from vime_megatron.sources.directory import DirectoryOptions, open_directory
from vime_megatron.sources.gguf import GgufOptions, open_gguf
from vime_megatron.sources.random_qwen2 import RandomQwen2Options, make_random_qwen2

SMALL: dict[str, Any] = {"layers": 1, "hidden": 16, "intermediate": 16, "heads": 2, "vocabulary": 270}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_random_qwen2(RandomQwen2Options(**SMALL), tmp_path / "cache")


def test_a_complete_directory_is_itself(model: Path, tmp_path: Path) -> None:
    assert open_directory(DirectoryOptions(path=model), tmp_path) == model.resolve()


def drop(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda model: (model / name).write_text(content) and None


def truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])


def shard(model: Path) -> None:
    """An index that names a tensor which its file does not hold."""
    weights = load_file(model / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "norm" in k}, model / "a.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def lost_shard(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (drop("config.json"), "has no config.json"),
        (drop("model.safetensors"), "has no model.safetensors"),
        (drop("tokenizer.json"), "holds no tokenizer"),
        (write("config.json", "{"), "config.json' is corrupt"),
        (write("config.json", "[]"), "config.json' is corrupt: it is no JSON object"),
        (write("config.json", "{}"), "it names no model_type"),
        (write("model.safetensors", ""), "model.safetensors' is corrupt"),
        (write("model.safetensors", "x" * 1000), "model.safetensors' is corrupt"),
        (write("model.safetensors.index.json", "{}"), "it has no weight_map"),
        (truncate, "model.safetensors' is corrupt"),
        (shard, "a.safetensors' is corrupt: it lacks tensor"),
        (lost_shard, "has no gone.safetensors"),
    ],
)
def test_an_unusable_directory_is_named(
    harm: Callable[[Path], None], named: str, model: Path, tmp_path: Path, open_at: Callable[..., Any]
) -> None:
    harm(model)
    with pytest.raises(ConfigError) as caught:
        open_directory(DirectoryOptions(path=model), tmp_path)
    assert named in caught.value.message
    assert str(model) in caught.value.message
    assert caught.value.remedy
    if "tokenizer" not in named:
        with pytest.raises(ConfigError):
            open_at(model)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.directory\.path = '.*nowhere' does not exist"):
        open_directory(DirectoryOptions(path=tmp_path / "nowhere"), tmp_path)


def test_shards_are_read(model: Path, open_at: Callable[..., Any]) -> None:
    whole = {name: t.clone() for name, t in open_at(model, policy_config()).weights()}
    weights = load_file(model / "model.safetensors")
    parts = {"a.safetensors": dict(list(weights.items())[::2]), "b.safetensors": dict(list(weights.items())[1::2])}
    for name, part in parts.items():
        save_file(part, model / name)
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model / "model.safetensors").unlink()
    again = dict(open_at(model, policy_config()).weights())
    assert list(again) == list(whole)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def policy_config() -> Any:
    from vime_megatron.testing import run_config

    return run_config(dtype="bf16")


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_may_name_its_output_layer(same: bool, model: Path, open_at: Callable[..., Any]) -> None:
    weights = load_file(model / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    head[3, 3] += 0 if same else 1
    save_file({**weights, "lm_head.weight": head}, model / "model.safetensors")
    if same:
        assert "lm_head.weight" not in dict(open_at(model).weights())
    else:
        with pytest.raises(ConfigError, match=r"lm_head\.weight differs"):
            open_at(model)


def test_weights_of_another_shape_are_named(model: Path, open_at: Callable[..., Any]) -> None:
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "model.norm.weight": torch.ones(7)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"decoder.final_layernorm.weight is \(7,\), the structure needs \(16,\)"):
        open_at(model)


def test_the_same_options_give_the_same_bytes(tmp_path: Path) -> None:
    places = [make_random_qwen2(RandomQwen2Options(**SMALL), tmp_path / name) for name in ("first", "second")]
    other = make_random_qwen2(RandomQwen2Options(**SMALL, seed=1), tmp_path / "first")
    contents = [{file.name: file.read_bytes() for file in place.iterdir()} for place in (*places, other)]
    assert contents[0] == contents[1]
    assert contents[0]["model.safetensors"] != contents[2]["model.safetensors"]
    assert places[0].name == places[1].name != other.name


def test_the_random_model_leaves_the_generators_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    make_random_qwen2(RandomQwen2Options(**SMALL), tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_the_tokenizer_takes_any_text_and_gives_it_back(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "What is 2 + 2? \n\tÄrger 日本 🦆"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer) == SMALL["vocabulary"]
    assert tokenizer.eos_token_id == 2
    assert all(isinstance(tokenizer.decode([i]), str) for i in range(len(tokenizer)))


def test_log_probs_of_the_random_model_vary(tmp_path: Path, open_at: Callable[..., Any]) -> None:
    from vime_megatron.testing import random_sequences

    place = make_random_qwen2(RandomQwen2Options(), tmp_path)
    (log_probs,) = open_at(place).log_probs([random_sequences([(1, 100)], vocabulary=512)])
    assert log_probs.std() > 0.5


@pytest.mark.parametrize(
    "change", [{"hidden": 20, "heads": 3}, {"heads": 4, "key_value_heads": 3}, {"vocabulary": 100}, {"seed": 1 << 64}]
)
def test_impossible_options_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        RandomQwen2Options(**change)


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        directory.mkdir()
        (directory / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "place", fail)
    assert list(tmp_path.iterdir()) == []
    assert make_once(tmp_path / "place", Path.mkdir) == tmp_path / "place"
    assert make_once(tmp_path / "place", fail) == tmp_path / "place"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        make_random_qwen2(RandomQwen2Options(**SMALL), tmp_path / "file")


def test_losing_a_race_is_no_error(tmp_path: Path) -> None:
    def overtaken(directory: Path) -> None:
        directory.mkdir()
        (tmp_path / "place").mkdir()
        (tmp_path / "place" / "theirs").touch()

    assert [f.name for f in make_once(tmp_path / "place", overtaken).iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"path": "nowhere.gguf"}, "^VIME-CONFIG-046: model.gguf.path = 'nowhere.gguf' does not exist"),
        ({"package": "no-such-package"}, "'no-such-package' is not installed"),
        ({"package": "pytest"}, "holds 0 GGUF files"),
    ],
)
def test_an_unusable_gguf_is_named(options: dict[str, str], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        open_gguf(GgufOptions(**options), tmp_path)


@pytest.mark.parametrize("options", [{}, {"path": "a.gguf", "package": "b"}])
def test_gguf_needs_one_of_both_keys(options: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="either path or package"):
        GgufOptions(**options)
