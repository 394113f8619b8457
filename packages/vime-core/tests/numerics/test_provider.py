"""Providers: what a digest names, how the C++ is built, and what a user reads when it cannot be."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from numerics_support import cpu, everyone

from vime_core.errors import ContractViolation, PolicyError
from vime_core.numerics import DENSE_V1, Contract, load_provider
from vime_core.numerics.cpu import build
from vime_core.numerics.cpu import provider as cpu_provider
from vime_core.numerics.operations import provider_digest, source_digest

FROZEN = "69ea11c1c925fcff86b8f7a49e1bc9c73a6be2127cfa3db1ab25a2373fe10d8d"


def test_the_contract_is_frozen() -> None:
    """A new definition is dense/v2; this digest never changes."""
    assert DENSE_V1.digest == FROZEN
    assert Contract.from_json(DENSE_V1.to_json()) == DENSE_V1
    changed = replace(DENSE_V1.operations[0], computes="something else")
    assert replace(DENSE_V1, operations=(changed, *DENSE_V1.operations[1:])).digest != FROZEN


def test_every_definition_points_at_its_module() -> None:
    root = Path(build.__file__).parents[1]
    for definition in DENSE_V1.operations:
        assert (root / f"{definition.module.rsplit('.', 1)[1]}.py").exists()


def test_what_is_no_contract_is_refused() -> None:
    with pytest.raises(ContractViolation, match="not a serialised contract"):
        Contract.from_json('{"id": "dense/v1"}')


def test_a_digest_names_what_runs_and_not_where() -> None:
    builds = {operations.digest for operations in everyone().values() if operations.provider == "cpu"}
    assert len(builds) == 1
    assert load_provider("cpu").digest in builds
    assert load_provider("reference").digest not in builds
    assert load_provider("reference") is load_provider("reference")
    assert load_provider("cpu") is load_provider("cpu")


def test_a_changed_source_is_another_digest(tmp_path: Path) -> None:
    copy = tmp_path / build.SOURCE.name
    copy.write_text(build.SOURCE.read_text())
    assert source_digest([copy]) == source_digest([build.SOURCE])
    copy.write_text(build.SOURCE.read_text().replace("0x9fc0", "0x1f80"))
    assert source_digest([copy]) != source_digest([build.SOURCE])


def test_every_name_and_value_of_a_parameter_is_in_the_digest() -> None:
    given = {"order": "ascending", "block": "64"}
    others = ({"order": "ascending", "block": "65"}, {"order": "64", "block": "ascending"}, {"order": "ascending"})
    assert provider_digest(dict(reversed(given.items()))) == provider_digest(given)
    assert provider_digest(given) not in {provider_digest(other) for other in (*others, {**given, "more": ""})}


def test_a_source_of_another_name_is_another_digest(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.py", "b.py")]
    for file in files:
        file.write_text("the same")
    assert source_digest(files[:1]) != source_digest(files[1:])


def test_unknown_providers_are_named_with_the_known() -> None:
    with pytest.raises(PolicyError, match="'rocm': there is no numerics provider") as error:
        load_provider("rocm")
    assert "cpu, cuda, reference" in error.value.remedy


def test_a_forced_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_provider.FORCE, "sve")
    with pytest.raises(PolicyError, match="instruction set 'sve'"):
        load_provider("cpu")


def test_a_forced_instruction_set_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    worst = build.supported()[-1].name
    monkeypatch.setenv(cpu_provider.FORCE, worst)
    assert load_provider("cpu").details["instruction set"] == worst


def test_a_machine_without_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "machine_features", frozenset)
    with pytest.raises(PolicyError, match="AVX2") as error:
        load_provider("cpu")
    assert "'reference'" in error.value.remedy


def test_a_dot_instruction_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(isa: build.InstructionSet) -> tuple[str, Path]:
        loaded.append(isa.name)
        return isa.name, Path(isa.name)

    monkeypatch.setattr(build, "load_library", load)
    monkeypatch.setattr(build, "supported", lambda: list(build.INSTRUCTION_SETS))
    answers = {"avx512bf16": False, "avx512": True}
    fakes = {name: SimpleNamespace(bf16_step_agrees=lambda agrees=agrees: agrees) for name, agrees in answers.items()}
    monkeypatch.setattr(cpu_provider.torch, "ops", SimpleNamespace(**fakes))
    monkeypatch.setattr(cpu_provider, "_operations", lambda *arguments: arguments[-1])
    assert cpu_provider.load() == "avx512"
    assert loaded == ["avx512bf16", "avx512"]
    with pytest.raises(PolicyError, match="does not compute its definition"):
        cpu_provider.load("avx512bf16")


def fake_compiler(directory: Path, body: str) -> Path:
    """A compiler that notes each call and then does ``body`` with $out."""
    script = directory / "compiler"
    script.write_text(f"#!/bin/sh\necho call >> {directory}/calls\nfor out; do :; done\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(cpu_provider.FORCE, raising=False)
    return tmp_path


def test_no_compiler_names_the_other_provider(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PolicyError, match=r"no C\+\+ compiler was found") as error:
        build.built_library(build.supported()[0])
    assert "'reference'" in error.value.remedy


def test_a_failing_compiler_is_quoted(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(empty_cache, "echo no such flag >&2; exit 1")))
    with pytest.raises(PolicyError, match="no such flag") as error:
        build.built_library(build.supported()[0])
    assert "'reference'" in error.value.remedy
    assert not list(build.cache_directory().glob("*.so"))


def test_a_cache_that_cannot_be_written(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty_cache / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(empty_cache / "file"))
    with pytest.raises(PolicyError, match="cannot be kept in") as error:
        build.built_library(build.supported()[0])
    assert "TORCH_EXTENSIONS_DIR" in error.value.remedy


def test_builders_at_the_same_time_build_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Path(everyone()[build.supported()[0].name].details["library"])
    compiler = fake_compiler(empty_cache, f'sleep 0.3; cp {built} "$out"')
    monkeypatch.setenv("CXX", str(compiler))
    libraries: list[Path] = []
    builders = [
        threading.Thread(target=lambda: libraries.append(build.built_library(build.supported()[0]))) for _ in range(4)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(libraries) == 4
    assert len(set(libraries)) == 1
    assert (empty_cache / "calls").read_text().splitlines() == ["call"]
    assert os.listdir(libraries[0].parent).count(libraries[0].name) == 1


def test_a_build_left_by_a_dead_process_is_taken_up(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock file and half a build lie there; nobody holds the lock."""
    built = Path(everyone()[build.supported()[0].name].details["library"])
    directory = build.cache_directory()
    (directory / "tmpabc").mkdir(parents=True)
    (directory / "tmpabc" / built.name).write_text("half")
    (directory / built.with_suffix(".lock").name).touch()
    monkeypatch.setenv("CXX", str(fake_compiler(empty_cache, f'cp {built} "$out"')))
    assert build.built_library(build.supported()[0]) == directory / built.name
    assert (directory / built.name).read_bytes() == built.read_bytes()


def test_another_torch_or_source_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = build.INSTRUCTION_SETS[0]
    key = build.build_key(isa)
    assert key != build.build_key(build.INSTRUCTION_SETS[1])
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert build.build_key(isa) != key


def test_tensors_elsewhere_are_refused() -> None:
    x = torch.empty(3, 4, device="meta")
    with pytest.raises((NotImplementedError, RuntimeError)):
        cpu().linear(x, x)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="neither float32 nor bfloat16"):
        cpu().linear(torch.zeros(2, 4, dtype=torch.float16), torch.zeros(3, 4, dtype=torch.float16))
