"""HF to torch_dist and back: the same bits, and damage or contradiction is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from vime_core.errors import ConfigError
from vime_megatron.conversion.flags import require_agreement
from vime_megatron.conversion.layout import Layout, chosen_layout
from vime_megatron.conversion.torch_dist import _built, started_ranks, to_hf_directory, to_torch_dist
from vime_megatron.model_directory import ModelDirectory, read_model_directory
from vime_megatron.parallel import Ranks
from vime_megatron.structures.dense import LLAMA, QWEN2, QWEN3
from vime_megatron.testing import unequal

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def converted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("converted") / "dist"
    said = to_torch_dist(llama, output, {"--num-layers": "2", "--hidden-size": "48", "--swiglu": None})
    assert said is not None
    assert said.tensors > 10
    assert said.root in str(said)
    return output


def test_there_and_back_is_the_same_bits(llama: Path, converted: Path, tmp_path: Path) -> None:
    back = to_hf_directory(converted, tmp_path / "hf")
    first, second = read_model_directory(llama), read_model_directory(tmp_path / "hf")
    assert unequal(first.load(), second.load()) == []
    assert first.config == second.config
    assert back.root == json.loads((converted / "vime.json").read_text())["root"]
    assert (converted / "latest_checkpointed_iteration.txt").read_text() == "release"


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_other_structures_and_bf16(model_type: str, save_hf: Callable[..., Any], tmp_path: Path) -> None:
    model, directory = save_hf(model_type)
    model.bfloat16().save_pretrained(directory)
    to_torch_dist(directory, tmp_path / "dist")
    to_hf_directory(tmp_path / "dist", tmp_path / "hf")
    assert unequal(read_model_directory(directory).load(), read_model_directory(tmp_path / "hf").load()) == []


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--num-layers", "24", r"--num-layers 24 contradicts num_hidden_layers = 2"),
        ("--rotary-base", "12345", r"--rotary-base 12345 contradicts rope"),
        ("--norm-epsilon", "1e-5", r"--norm-epsilon 1e-5 contradicts rms_norm_eps"),
        ("--kv-channels", "4096", r"--kv-channels 4096 contradicts .*head_dim"),
        ("--untie-embeddings-and-output-weights", None, r"--untie-embeddings-and-output-weights contradicts"),
        ("--normalization", "LayerNorm", r"--normalization LayerNorm: only RMSNorm"),
        ("--normalization", None, r"--normalization : only RMSNorm"),
        ("--qk-layernorm", None, r"--qk-layernorm contradicts"),
        ("--add-qkv-bias", None, r"--add-qkv-bias contradicts"),
        ("--add-bias-linear", None, r"--add-bias-linear contradicts"),
        ("--num-experts", "8", r"--num-experts 8: only 0"),
        ("--position-embedding-type", "learned_absolute", r"learned_absolute: only rope"),
        ("--rotary-percent", "0.5", r"--rotary-percent 0.5: only 1.0"),
        ("--expert-model-parallel-size", "2", r"--expert-model-parallel-size 2: only 1"),
        ("--context-parallel-size", "2", r"--context-parallel-size 2: only 1"),
        ("--tensor-model-parallel-size", None, r"--tensor-model-parallel-size  is no number"),
        ("--fp16", None, r"--fp16 contradicts the weights, which are fp32"),
        ("--bf16", None, r"--bf16 contradicts the weights, which are fp32"),
        ("--swiglu", "3", r"--swiglu 3: the flag takes no value"),
        ("--nonsense", "3", r"--nonsense is no model flag"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint_is_named(
    flag: str, value: str | None, says: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        to_torch_dist(llama, tmp_path / "dist", {flag: value})
    assert not (tmp_path / "dist").exists()


def test_an_implied_head_size_is_compared(llama: Path) -> None:
    config = {key: value for key, value in read_model_directory(llama).config.items() if key != "head_dim"}
    directory = ModelDirectory(llama, config, {})
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    require_agreement({"--kv-channels": str(hidden // heads)}, directory, LLAMA.blueprint(config))
    with pytest.raises(ConfigError, match=r"--kv-channels 64 contradicts the implied head_dim"):
        require_agreement({"--kv-channels": "64"}, directory, LLAMA.blueprint(config))


def test_flags_that_are_true_of_a_structure_pass(llama: Path) -> None:
    config = {**read_model_directory(llama).config, "tie_word_embeddings": False}
    for structure, flags in (
        (LLAMA, ["--untie-embeddings-and-output-weights", "--disable-bias-linear"]),
        (QWEN2, ["--add-qkv-bias", "--swiglu", "--bf16"]),
        (QWEN3, ["--qk-layernorm"]),
    ):
        require_agreement(dict.fromkeys(flags), ModelDirectory(llama, config, {}), structure.blueprint(config))
    biased = {**config, "mlp_bias": True}
    with pytest.raises(ConfigError, match=r"--disable-bias-linear contradicts"):
        require_agreement({"--disable-bias-linear": None}, ModelDirectory(llama, biased, {}), LLAMA.blueprint(biased))


def test_the_flags_of_the_recipe_are_those_of_its_model() -> None:
    script = (ROOT / "scripts" / "models" / "qwen2.5-0.5B.sh").read_text()
    lines = [line.split() for line in script.splitlines() if line.startswith("  --")]
    flags = {line[0]: line[1] if len(line) > 1 else None for line in lines}
    assert len(flags) == 14
    config = {
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    }
    directory = ModelDirectory(ROOT, config, {})
    require_agreement(flags, directory, QWEN2.blueprint(config))
    with pytest.raises(ConfigError, match=r"--num-layers 24 contradicts"):
        require_agreement(flags, ModelDirectory(ROOT, {**config, "num_hidden_layers": 2}, {}), QWEN2.blueprint(config))


def test_an_output_that_exists_is_refused(llama: Path, converted: Path) -> None:
    for convert in (lambda: to_torch_dist(llama, converted), lambda: to_hf_directory(converted, llama)):
        with pytest.raises(ConfigError, match="exists"):
            convert()


def test_a_changed_tensor_is_found(llama: Path, tmp_path: Path) -> None:
    to_torch_dist(llama, tmp_path / "dist")
    file = max((tmp_path / "dist" / "release").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="no sound checkpoint"):
        to_hf_directory(tmp_path / "dist", tmp_path / "hf")


def test_what_is_no_checkpoint_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable vime.json"):
        to_hf_directory(llama, tmp_path / "hf")


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "copy"))


@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata", "metadata.json"])
@pytest.mark.parametrize("change", ["cut", "emptied", "removed"])
def test_damage_of_any_file_of_the_tensors_is_named(pattern: str, change: str, copy: Path, tmp_path: Path) -> None:
    file = max((copy / "release").glob(pattern), key=lambda path: path.stat().st_size)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] if change == "cut" else b"")
    if change == "removed":
        file.unlink()
    with pytest.raises(ConfigError, match=r"copy' is no sound checkpoint: .{10}"):
        to_hf_directory(copy, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def change_config(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


def cut_config(hf: Path) -> None:
    (hf / "config.json").write_text((hf / "config.json").read_text()[:20])


def no_config(hf: Path) -> None:
    (hf / "config.json").unlink()


def no_file(hf: Path) -> None:
    (hf / "generation_config.json").unlink()


def one_more(hf: Path) -> None:
    (hf / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (change_config, "hf/config.json differs"),
        (cut_config, "hf/config.json differs"),
        (no_config, "hf/config.json is missing"),
        (no_file, "hf/generation_config.json is missing"),
        (one_more, "hf/tokenizer.json stands there"),
        (shutil.rmtree, "hf/config.json is missing"),
    ],
)
def test_every_file_of_the_way_back_is_checked(
    damage: Callable[[Path], None], says: str, copy: Path, tmp_path: Path
) -> None:
    damage(copy / "hf")
    with pytest.raises(ConfigError, match=says):
        to_hf_directory(copy, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("root", "0" * 64, r"vime.json has root '0000.*and its digests have"),
        ("dtype", "fp8", r"no readable vime.json: dtype: .*'bf16' or 'fp32'"),
        ("format", "vime-torch-dist/1", r"vime.json has format 'vime-torch-dist/1'"),
        ("digests", {"a": "xyz"}, r"no readable vime.json: .*'?a"),
        ("files", {}, r"hf/config.json stands there, and vime.json does not list it"),
    ],
)
def test_a_note_that_contradicts_itself_is_named(
    key: str, value: object, says: str, copy: Path, tmp_path: Path
) -> None:
    note = json.loads((copy / "vime.json").read_text())
    (copy / "vime.json").write_text(json.dumps({**note, key: value}))
    with pytest.raises(ConfigError, match=says):
        to_hf_directory(copy, tmp_path / "hf")


TOOL = ROOT / "tools" / "convert_hf_to_torch_dist.py"


def by_ranks(source: Path, output: Path, ranks: int, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(TOOL), "--hf-checkpoint", str(source), "--save", str(output), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.slow
def test_several_ranks_write_what_one_writes(llama: Path, converted: Path, tmp_path: Path) -> None:
    ran = by_ranks(llama, tmp_path / "dist", 4, "--tensor-model-parallel-size", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("read back and equal") == 1
    writers = {file.name.split("_")[2] for file in (tmp_path / "dist" / "release").glob("*.distcp")}
    assert writers == {"0", "1", "2", "3"}
    assert (tmp_path / "dist" / "vime.json").read_text() == (converted / "vime.json").read_text()
    to_hf_directory(tmp_path / "dist", tmp_path / "hf")
    assert unequal(read_model_directory(llama).load(), read_model_directory(tmp_path / "hf").load()) == []


def test_shares_cover_every_element_once(llama: Path) -> None:
    with _built(read_model_directory(llama), "fp32") as (model, _):
        state = model.sharded_state_dict()
        for layout in (Layout(), Layout(2, 2), Layout(4, 1), Layout(5, 2), Layout(1, 2)):
            counts: dict[str, Any] = {}
            for rank in range(layout.tensor * layout.pipeline):
                for part in layout.share(dict(state), rank, 2).values():
                    if isinstance(part, ShardedTensor):
                        count = counts.setdefault(part.key, torch.zeros(part.global_shape))
                        count[part.global_slice()] += 1
            assert len(counts) == 8
            assert all(bool((count == 1).all()) for count in counts.values())


@pytest.mark.parametrize(
    ("ranks", "flags", "says"),
    [
        (4, {"--tensor-model-parallel-size": "3"}, "3 and --pipeline-model-parallel-size 1 are of 3 ranks, and 4 were"),
        (1, {"--tensor-model-parallel-size": "2"}, "are of 2 ranks, and 1 were started"),
        (4, {}, "--pipeline-model-parallel-size 4 is more than the model's 2 layers"),
        (2, {"--tensor-model-parallel-size": "two"}, "--tensor-model-parallel-size two is no number"),
    ],
)
def test_a_layout_that_does_not_fit_is_named(ranks: int, flags: dict[str, str | None], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        chosen_layout(Ranks(world_size=ranks), flags, 2)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x', which is no number from 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE='²'"),
        ({"WORLD_SIZE": "2"}, "RANK='', which is no number from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "RANK='2'"),
    ],
)
def test_what_torchrun_never_sets_is_refused_by_name(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        started_ranks(environment)


def test_torchrun_says_which_rank_this_is() -> None:
    assert started_ranks({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}) == Ranks(3, 4, 1, "env://")
    assert started_ranks({"RANK": "3"}) == Ranks()
