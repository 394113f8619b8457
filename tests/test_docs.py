"""The documentation tells the truth: codes, keys and commands that it names exist, and the other way round."""

from __future__ import annotations

import re
import runpy
import tomllib

import pytest
import torch
from command import ROOT, vime

CODE = re.compile(r"VIME-[A-Z]+-\d{3}")


def codes_in_source() -> set[str]:
    files = [file for file in ROOT.glob("packages/*/src/**/*.py") if file.name != "errors.py"]
    return {code for file in files for code in CODE.findall(file.read_text())}


def test_every_code_has_an_entry_and_every_entry_a_code() -> None:
    documented = set(re.findall(r"^### (VIME-[A-Z]+-\d{3})", (ROOT / "docs" / "findings.md").read_text(), re.M))
    assert codes_in_source() == documented


def test_every_code_says_what_is_wrong() -> None:
    entries = re.split(r"^### ", (ROOT / "docs" / "findings.md").read_text(), flags=re.M)[1:]
    assert [one.partition("\n")[0] for one in entries if not re.search(r"^- \*\*.{8,}\*\*$", one, flags=re.M)] == []
    assert not any("From TOML files and" in one.partition("  - ")[0] for one in entries)


def test_the_page_of_findings_is_current() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_findings.py"))
    assert tool["page"]() == (ROOT / "docs" / "findings.md").read_text(), "run tools/write_findings.py"


def test_the_configuration_reference_is_current() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_config_reference.py"))
    current = (ROOT / "docs" / "configuration.md").read_text()
    assert tool["page"](current) == current, "run tools/write_config_reference.py"


def test_every_key_of_the_schema_is_described() -> None:
    from vime_core.config.schema import RunConfig

    bare = [
        f"{section}.{key}"
        for section, holder in RunConfig.model_fields.items()
        for key, field in holder.annotation.model_fields.items()  # type: ignore[union-attr]
        if key != "plugin_options" and not field.description
    ]
    assert bare == []


NEEDS = {"qwen2.5-0.5B-gsm8k": "Qwen2.5-0.5B-Instruct", "glm5.2-6layer": "GLM-5.2-FP8"}
"""What a user downloads first; tests/test_recipe_e2e.py runs the recipe with small data of the same form."""


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*.toml")), ids=lambda file: file.name)
def test_the_shipped_configurations_resolve(file) -> None:
    provider = tomllib.loads(file.read_text()).get("alignment", {}).get("provider")
    elsewhere = ["--set", "alignment.provider=cpu"] if provider == "cuda" and not torch.cuda.is_available() else []
    ran = vime("run", file, "--dry-run", *elsewhere)
    if file.stem in NEEDS:
        assert ran.code == 2
        assert f"/{NEEDS[file.stem]}' does not exist" in ran.text
        return
    assert ran.code == 0, ran.text
    assert tomllib.loads(ran.out)["run"]["name"] == file.stem


def test_every_command_that_the_readme_shows_exists() -> None:
    shown = set(re.findall(r"^vime ([a-z]+)(?: ([a-z][a-z-]+))?", (ROOT / "README.md").read_text(), re.M))
    assert shown
    for command, sub in shown:
        words = [command, sub] if sub else [command]
        assert vime(*words, "--help").code == 0, words


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
