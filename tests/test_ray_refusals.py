"""What the launcher ``ray`` refuses before anything is started."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from command import ROOT

from vime_core.config.load import load_config
from vime_core.errors import ConfigError, Interrupted, VimeError
from vime_core.loop.preparation import Preparation
from vime_core.loop.readiness import SIDES, require_ready
from vime_core.loop.sides import load_policy
from vime_core.ray.cluster import Cluster
from vime_core.ray.options import RayOptions

pytest.importorskip("ray")


def checked(tmp_path: Path, *overrides: str, launcher: str = "ray") -> None:
    ours = [f"run.cache='{tmp_path}'", f"run.launcher={launcher}", *overrides]
    config, plugins = load_config([ROOT / "configs" / "aligned-smoke.toml"], ours)
    require_ready(Preparation(config, load_policy(config, plugins), plugins), SIDES)


@pytest.mark.parametrize(
    ("overrides", "code", "parts"),
    [
        (["trainer.megatron.tensor_parallel=2"], "VIME-ALIGN-032", ["dense/v1", "tensor_parallel = 1; 2 is set"]),
        (
            ["trainer.megatron.tensor_parallel=3", "alignment.contract=''"],
            "VIME-CONFIG-073",
            ["tensor_parallel = 3 does not divide", "num_attention_heads = 4"],
        ),
        (
            ["rollout.engines=900", "trainer.megatron.data_parallel=2"],
            "VIME-CONFIG-071",
            ["902 actors", "reserve 902 CPU, and this machine has "],
        ),
        (["run.ray.env_vars={NCCL_ALGO='Tree'}"], "VIME-ENV-008", ["NCCL_ALGO = 'Tree'", "needs 'Ring'"]),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(
    overrides: list[str], code: str, parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(VimeError) as caught:
        checked(tmp_path, *overrides)
    assert caught.value.code == code
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("override", ["trainer.megatron.data_parallel=2", "rollout.engines=2"])
def test_inline_holds_one_of_each(override: str, tmp_path: Path) -> None:
    with pytest.raises(VimeError, match="'inline' holds") as caught:
        checked(tmp_path, override, launcher="inline")
    assert caught.value.code == "VIME-CONFIG-056"
    assert "run.launcher = 'ray'" in caught.value.remedy


def test_absent_ray_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime_core.ray.library.installed_version", lambda _: None)
    with pytest.raises(VimeError, match=r"VIME-PLUGIN-050: .*\n.*pip install 'vime-core\[ray\]'"):
        checked(tmp_path)


def joining(address: str) -> Cluster:
    return Cluster(RayOptions.model_validate({"address": address}))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999"])
def test_an_address_where_nothing_listens_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        joining(address)
    assert (caught.value.code, caught.value.exit_code) == ("VIME-CONFIG-076", 2)
    assert f"run.ray.address = {address!r}" in caught.value.message
    assert "ray start --head" in caught.value.remedy


def test_sigterm_while_joining_ends_the_run_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something listens and never answers; Ray's own handler makes a SystemExit of the signal."""
    before = signal.getsignal(signal.SIGTERM)

    def waiting(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("ray.init", waiting)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(Interrupted) as caught:
        joining(f"127.0.0.1:{server.getsockname()[1]}")
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
