"""The command line of the verdicts: options, exit codes, table and JSON. What it calls is planted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vime_cli.commands.twice import ended
from vime_cli.commands.verify import LEGEND, table, worst_exit_code
from vime_cli.main import main
from vime_core.errors import BackendError, ConfigError, ContractViolation, VimeError
from vime_core.verify import checks
from vime_core.verify.verdict import Coverage, Verdict

HOLDS = Verdict("align", True, "Align holds.", Coverage(samples=4, tokens=9, log_probs=18), entropy=2.5, changed=0.75)
BROKEN = Verdict("batch", False, "Batch does not hold.", Coverage(tokens=9), 3, 0.25, 17, "in company, token 2")
OPEN = Verdict("gradient", None, "Gradient could not be checked.", first="reference")

CONFIG = """
[run]
output = "{output}"
[model]
source = "directory"
[model.directory]
path = "nowhere"
[data]
source = "reasoning-gym"
[data.reasoning-gym]
task = "chain_sum"
[reward]
name = "length"
[plugins]
modules = ["a_plugin_with_checks"]
"""
PLUGIN = """
from vime_core.plugins import AlignmentCheck, hookimpl
from vime_core.verify.verdict import Coverage, Verdict

@hookimpl
def vime_alignment_checks():
    yield AlignmentCheck("router", "Do both sides route alike?", "a_plugin_with_checks:run")

def run(config, plugins):
    sentence = f"Router does not hold at {config.run.seed}."
    return Verdict("router", False, sentence, Coverage(tokens=2), unequal=1, first="here")
"""

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "a_plugin_with_checks.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(output=tmp_path / "record"))
    yield file
    sys.modules.pop("a_plugin_with_checks", None)


@pytest.fixture
def run(config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(name: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["vime", "verify", name, str(config_file), *arguments])
        code = main()
        return code, capsys.readouterr().out

    return command


@pytest.mark.parametrize(("verdict", "code"), [(HOLDS, 0), (BROKEN, 1), (OPEN, 3)])
@pytest.mark.parametrize("name", ["align", "batch", "gradient"])
def test_exit_codes(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, verdict: Verdict, code: int) -> None:
    monkeypatch.setattr(checks, f"run_{name}", lambda *_arguments: verdict)
    assert run(name) == (code, f"{verdict.sentence}\n\n{table([verdict])}\n\n{LEGEND}\n")
    got, out = run(name, "--json")
    assert got == code
    assert json.loads(out)["exit_code"] == code
    assert json.loads(out)["sentence"] == verdict.sentence


def test_options_arrive(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def note(config: Any, _plugins: Any, *rest: Any) -> Verdict:
        seen.append((config.run.seed, *rest))
        return HOLDS

    for name in ("align", "batch"):
        monkeypatch.setattr(checks, f"run_{name}", note)
    run("align", "--layers", "--samples", "5", "--updates", "3", "--lr", "0.5", "--set", "run.seed=11")
    run("batch", "--company", "7")
    run("align")
    assert seen == [
        (11, checks.AlignOptions(5, 3, True), 0.5),
        (0, checks.BatchOptions(7)),
        (0, checks.AlignOptions(), 1e-3),
    ]


@pytest.mark.parametrize("arguments", [("--updates", "0"), ("--samples", "-1"), ("--nonsense",)])
def test_usage_errors(run: Run, arguments: tuple[str, ...]) -> None:
    assert run("align", *arguments)[0] == 2


def test_more_than_the_context_is_refused(run: Run) -> None:
    code, out = run("align", "--longest", "1025", "--json")
    error = json.loads(out)["error"]
    assert (code, error["code"]) == (2, "VIME-CONFIG-070")
    assert error["message"] == "--longest 1025 is more than rollout.context_length = 1024"
    assert "at most 1024" in error["help"]
    code, out = run("align", "--longest", "1024", "--json")
    assert "--longest" not in json.loads(out)["error"]["message"]


def test_the_table_says_of_how_many_log_probs(run: Run) -> None:
    verdict = Verdict("align", False, "No.", Coverage(samples=4, tokens=9, log_probs=18), unequal=15, first="here")
    header, row = (line.split() for line in table([verdict]).splitlines())
    assert dict(zip(header, [*row[:1], " ".join(row[1:4]), *row[4:]], strict=True))["log-probs"] == "18"
    assert "log-probs: " in LEGEND


def test_a_check_of_a_plugin(run: Run) -> None:
    code, out = run("router", "--set", "run.seed=3")
    assert code == 1
    assert out.startswith("Router does not hold at 3.")
    code, out = run("router", "--json")
    assert (code, json.loads(out)["first"]) == (1, "here")


def test_an_unknown_verdict(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run("roter", "--json")
    assert code == 2
    message = json.loads(out)["error"]["message"]
    assert "no such verdict. Known: align, all, batch, gradient, repeat, resume, router" in message


def test_all(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_every(_config: Any, _plugins: Any, samples: int, updates: int, starting: Any) -> Iterator[Verdict]:
        assert (samples, updates) == (2, 1)
        starting("batch")
        yield from (BROKEN, OPEN)

    monkeypatch.setattr(checks, "run_every", run_every)
    monkeypatch.setattr("vime_cli.commands.verify.run_twice", lambda *_a, **_k: [tmp_path / "a", tmp_path / "b"])
    monkeypatch.setattr("vime_cli.commands.verify._compare_records", lambda _a, _b: HOLDS)
    code, out = run("all", "--samples", "2", "--updates", "1")
    assert code == 1
    lines = out[out.index("verdict  ") :].splitlines()
    assert lines[0].split() == [
        *("verdict", "outcome", "samples", "tokens", "log-probs", "tensors", "longest", "unequal"),
        *("nats", "ulps", "entropy", "changed", "first"),
    ]
    assert lines[1].split() == ["align", "holds", "4", "9", "18", "0", "0", "0", "0", "0", "2.500", "75.0%", "-"]
    assert "does not hold" in lines[2]
    assert "in company, token 2" in lines[2]
    assert all(v.sentence in out for v in (HOLDS, BROKEN, OPEN))
    code, out = run("all", "--samples", "2", "--updates", "1", "--json")
    assert code == 1
    document = json.loads(out)
    assert document["exit_code"] == 1
    assert [(v["name"], v["exit_code"]) for v in document["verdicts"]] == [("align", 0), ("batch", 1), ("gradient", 3)]


def test_all_goes_on_when_a_run_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any, **_options: Any) -> list[Path]:
        raise BackendError("the run ended with exit code 3", remedy="None.", code="VIME-BACKEND-001")

    monkeypatch.setattr("vime_cli.commands.verify.run_twice", fail)
    monkeypatch.setattr(checks, "run_every", lambda *_arguments: iter([HOLDS]))
    code, out = run("all", "--json")
    assert (code, [v["exit_code"] for v in json.loads(out)["verdicts"]]) == (3, [3, 0])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ContractViolation("step 1 differs", remedy="Look.", code="VIME-ALIGN-008"), (1, "VIME-ALIGN-008")),
        (ConfigError("bad key", remedy="Change it.", code="VIME-CONFIG-019"), (2, "VIME-CONFIG-019")),
        (BackendError("died", remedy="None.", code="VIME-BACKEND-001"), (3, "VIME-BACKEND-001")),
    ],
)
def test_what_a_run_ended_with_goes_through(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: VimeError, expected: tuple[int, str]
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> list[Path]:
        raise error

    monkeypatch.setattr("vime_cli.commands.verify.run_twice", fail)
    code, out = run("repeat", "--json")
    document = json.loads(out)
    assert (code, document["first"] if code == 1 else document["error"]["code"]) == expected
    assert code != 1 or (document["holds"] is False and "step 1 differs" in document["sentence"])


@pytest.mark.parametrize(
    ("code", "kind"), [(1, ContractViolation), (2, ConfigError), (3, BackendError), (-9, BackendError)]
)
def test_an_exit_code_is_an_error_of_its_kind(tmp_path: Path, code: int, kind: type[VimeError]) -> None:
    error = ended(tmp_path / "none", code, "error VIME-X: bad\n  help: do")
    assert type(error) is kind
    assert "error VIME-X: bad help: do" in error.message


def test_all_shows_what_finished_before_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def part_of(*_arguments: Any) -> Iterator[Verdict]:
        yield BROKEN
        raise ConfigError("bad key", remedy="Change it.", code="VIME-CONFIG-019")

    monkeypatch.setattr("vime_cli.commands.verify.run_twice", lambda *_a, **_o: [Path("a"), Path("b")])
    monkeypatch.setattr("vime_cli.commands.verify._compare_records", lambda *_records: HOLDS)
    monkeypatch.setattr(checks, "run_every", part_of)
    code, out = run("all", "--json")
    document = json.loads(out)
    assert (code, [v["name"] for v in document["verdicts"]]) == (1, ["align", "batch"])
    assert document["error"]["code"] == "VIME-CONFIG-019"
    code, out = run("all")
    assert (code, out.count(HOLDS.sentence), out.count(BROKEN.sentence)) == (1, 1, 1)
    assert "The rest was not checked, because of an error after these 2" in out
    monkeypatch.setattr("vime_cli.commands.verify._compare_records", lambda *_records: HOLDS)
    monkeypatch.setattr(checks, "run_every", lambda *_arguments: _fails_at_once())
    assert run("all", "--json")[0] == 2


def _fails_at_once() -> Iterator[Verdict]:
    yield from ()
    raise ConfigError("bad key", remedy="Change it.", code="VIME-CONFIG-019")


@pytest.mark.parametrize("records", [1, 3])
def test_repeat_with_records_that_are_not_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, records: int
) -> None:
    paths = [tmp_path / str(number) for number in range(records)]
    for path in paths:
        path.mkdir()
    config = tmp_path / "c.toml"
    config.touch()
    for inputs in (paths, [*paths, config]):
        monkeypatch.setattr(sys, "argv", ["vime", "verify", "repeat", *map(str, inputs), "--json"])
        assert main() == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["code"] == "VIME-CONFIG-021"
        assert f"was given {records} record" in error["message"]
        assert ("and 1 files" in error["message"]) == (inputs[-1] == config)


@pytest.mark.parametrize(("codes", "worst"), [([0, 0], 0), ([0, 3], 3), ([3, 1, 0], 1), ([], 3), ([0, 2], 3), ([1], 1)])
def test_the_worst_exit_code(codes: list[int], worst: int) -> None:
    assert worst_exit_code(codes) == worst


def test_help_names_the_verdicts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["vime", "verify", "--help"])
    assert main() == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("align", "batch", "gradient", "repeat", "all", "vime verify NAME CONFIG"))
