from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vime_core.errors import ConfigError
from vime_megatron.conversion import gguf as conversion
from vime_megatron.conversion.gguf import convert_gguf
from vime_megatron.sources.gguf import GgufOptions, open_gguf

gguf = pytest.importorskip("gguf")

HIDDEN, FFN, HEADS, GROUPS, LAYERS, VOCABULARY = 64, 96, 4, 2, 2, 260


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with matrices in Q8_0 and norms in fp32, as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    add_tokenizer(writer)
    generator = np.random.default_rng(0)
    for name, shape in shapes().items():
        values = (0.1 * generator.normal(size=shape) + ("norm" in name)).astype(np.float32)
        if "norm" in name:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: Any) -> None:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def shapes() -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * GROUPS
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    blocks = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (VOCABULARY, HIDDEN), **blocks, "output_norm.weight": (HIDDEN,)}


def test_weights_are_dequantised_and_rounded_once(file: Path, tmp_path: Path) -> None:
    place = convert_gguf(file, tmp_path / "out")
    written = load_file(place / "model.safetensors")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        exact = gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        assert torch.equal(written[ours], torch.from_numpy(np.array(exact)).bfloat16())
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert "quantization_config" not in (place / "config.json").read_text()


def test_the_result_is_a_model_for_the_trainer(file: Path, tmp_path: Path, open_at: Callable[..., Any]) -> None:
    from transformers import AutoTokenizer

    place = open_gguf(GgufOptions(path=file), tmp_path)
    assert open_gguf(GgufOptions(path=file), tmp_path) == place
    assert len(dict(open_at(place).weights())) == 20
    assert AutoTokenizer.from_pretrained(place)("hello").input_ids


def test_an_existing_output_is_left_alone(file: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        convert_gguf(file, tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no gguf at all"])
def test_a_corrupt_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.gguf' cannot be read"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_flipped_bit_in_what_was_written_is_noticed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = conversion._load

    def flipping(path: Path) -> tuple[Any, Any]:
        model, tokenizer = load(path)
        save = model.save_pretrained

        def save_and_flip(place: Path) -> None:
            save(place)
            content = bytearray((place / "model.safetensors").read_bytes())
            content[-5] ^= 1
            (place / "model.safetensors").write_bytes(content)

        monkeypatch.setattr(model, "save_pretrained", save_and_flip)
        return model, tokenizer

    monkeypatch.setattr(conversion, "_load", flipping)
    with pytest.raises(ConfigError, match="reads back differently"):
        convert_gguf(file, tmp_path / "out")
