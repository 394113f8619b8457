"""What the launcher ``ray`` is made of, without Ray: bytes of tensors, agreement, room, and what a death says."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime_core.backends import DrawingTrainer, EntropyTrainer, Ranks, TrainerContext
from vime_core.errors import BackendError, ConfigError, ContractViolation, NotFinite, PolicyError, VimeError
from vime_core.ray.cluster import Demand, require_room
from vime_core.ray.crew import Crew, Member, agreed, how_it_ended
from vime_core.ray.hosts import Abilities, EngineHost, Place, TrainerHost
from vime_core.ray.rollout import AlignedRayRollout, RayRollout
from vime_core.ray.tensors import RemoteTensors, chunks, pack, unpack
from vime_core.ray.trainer import AlignedRayTrainer, DrawingRayTrainer, RayTrainer, ReferenceRayTrainer, ray_trainer
from vime_core.record.digest import digest_tensors
from vime_core.types import SampleRequest

ROLLOUT = ("generate", "update_weights", "weight_digests", "processes", "close")
DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8)


def member(number: int, logs: Path = Path("/nonexistent")) -> Member:
    return Member(None, f"trainer rank {number}", Place("10.0.0.1", "n", 4711, (), logs))


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**31))
def test_a_tensor_keeps_its_bits_on_the_way(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
    name, back = unpack(pack("w", tensor.T if len(shape) == 2 else tensor))
    assert (name, back.dtype) == ("w", dtype)
    sent = tensor.T.contiguous() if len(shape) == 2 else tensor
    assert digest_tensors([("w", back)]) == digest_tensors([("w", sent)])


def test_the_port_where_ranks_will_meet_is_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setattr("vime_core.ray.hosts.ray", lambda: SimpleNamespace(util=here))
    monkeypatch.setattr(
        "vime_core.ray.hosts.load_attribute", lambda *_: lambda context: meet(context.ranks.init_method)
    )

    def meet(address: str) -> torch.distributed.TCPStore:
        host, port = address.removeprefix("tcp://").split(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", int(port)))
        return torch.distributed.TCPStore(host, int(port), 1, is_master=True)

    first = TrainerHost()
    ranks = Ranks(0, 2, 0, first.free_address())
    first.open("", "", TrainerContext(*[None] * 4), ranks)  # pyright: ignore
    first._held.set("met", "yes")
    assert first._held.get("met") == b"yes"


def test_chunks_hold_every_tensor_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime_core.ray.tensors.CHUNK_BYTES", 100)
    named = [(f"t{i}", torch.full((size,), float(i))) for i, size in enumerate([10, 10, 10, 100, 1])]
    groups = list(chunks(iter(named)))
    assert [[one.name for one in group] for group in groups] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]


def test_digests_are_asked_where_the_tensors_are() -> None:
    remote = RemoteTensors(lambda: {"w": "there"}, lambda: iter(["a"]), lambda _: [pack("w", torch.ones(2))])
    assert digest_tensors(remote) == {"w": "there"}
    assert [(name, tensor.tolist()) for name, tensor in remote] == [("w", [1.0, 1.0])]


def test_ranks_that_disagree_are_named_with_the_tensor() -> None:
    members = [member(0), member(1), member(2)]
    same = {"a": "1", "b": "2"}
    assert agreed("weights", members, [same, dict(same), dict(same)]) == same
    for other in ({"a": "1", "b": "3"}, {"a": "1"}, {"b": "2", "a": "1"}):
        with pytest.raises(ContractViolation, match=r"trainer rank 0 and trainer rank 2 hold different weights"):
            agreed("weights", members, [same, same, other])
    with pytest.raises(ContractViolation, match=r"\['b'\]"):
        agreed("weights", members[:2], [same, {"a": "1", "b": "3"}])


def test_more_than_there_is_names_both() -> None:
    demands = [Demand("trainer rank 0", {"CPU": 1.0, "GPU": 1.0}), Demand("engine 0", {"CPU": 0.5, "GPU": 2.0})]
    require_room(demands, {"CPU": 1.5, "GPU": 3.0}, "this machine")
    with pytest.raises(ConfigError, match=r"trainer rank 0, engine 0\) reserve 3 GPU, and this machine has 2"):
        require_room(demands, {"CPU": 2.0, "GPU": 2.0}, "this machine")
    with pytest.raises(ConfigError, match="reserve 3 GPU, and this machine has 0"):
        require_room(demands, {"CPU": 2.0}, "this machine")
    many = [Demand(f"engine {number}", {"CPU": 1.0}) for number in range(5000)]
    with pytest.raises(ConfigError, match=r"5000 actors \(engine 0, [^)]{,60}, \.\.\., engine 4999\) reserve 5000 CPU"):
        require_room(many, {"CPU": 2.0}, "this machine")


def request(prompt: int, sample: int) -> SampleRequest:
    return SampleRequest(prompt, sample, (1,), seed=0, max_tokens=1)


def test_the_prompt_index_alone_says_which_engine_answers() -> None:
    rollout: Any = RayRollout(Crew([member(0), member(1), member(2)]))
    requests = [request(prompt, sample) for prompt in (4, 5, 6, 7) for sample in (0, 1)]
    parts = rollout._parts(requests)
    assert [[r.key for r in part] for part in parts] == [
        [(6, 0), (6, 1)],
        [(4, 0), (4, 1), (7, 0), (7, 1)],
        [(5, 0), (5, 1)],
    ]
    rollout._asked = [rollout._engine(r) for r in requests]
    assert [r.key for r in rollout._in_order(parts)] == [r.key for r in requests]
    fewer = [r.key for r in rollout._in_order([parts[0], parts[1][:-1], parts[2]])]
    assert fewer == [r.key for r in requests if r.key != (7, 1)]
    more = [r.key for r in rollout._in_order([[*parts[0], parts[0][0]], *parts[1:]])]
    assert more == [*(r.key for r in requests), (6, 0)]


@pytest.mark.parametrize(
    ("said", "log", "expected"),
    [
        ("exits with a connection error code 2. End of file.", "", "as SIGKILL does"),
        ("a connection error code 2. End", "Fatal Python error: Segmentation fault\n", "a fatal error, Segmentation"),
        ("exit code 1. The process receives a SIGTERM.", "", "ended by SIGTERM"),
        (
            "exit type: USER_ERROR Worker exit detail: It asked for too much. ",
            "",
            "USER_ERROR: It asked for too",
        ),
    ],
)
def test_a_death_has_a_cause(said: str, log: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "worker-abc-4711.err").write_text(log)
    (tmp_path / "worker-abc-4712.err").write_text("Fatal Python error: of another process\n")
    assert expected in how_it_ended(member(1, tmp_path), said)


@pytest.mark.parametrize("kind", [VimeError, BackendError, ConfigError, NotFinite, PolicyError])
def test_an_error_keeps_code_and_remedy_on_the_way(kind: type[VimeError]) -> None:
    sent = kind("what", remedy="do that", code="VIME-TEST-001")
    back = pickle.loads(pickle.dumps(sent))
    assert (type(back), back.message, back.remedy, back.code, str(back)) == (
        kind,
        "what",
        "do that",
        "VIME-TEST-001",
        str(sent),
    )


class Drawing:
    """As much of a `vime_core.backends.DrawingTrainer` as tells it from others."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self.lacks:
            raise AttributeError(name)
        return lambda *_: None

    lacks: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("lacks", "kind"),
    [
        ((), DrawingRayTrainer),
        (("draw_again",), AlignedRayTrainer),
        (("draw_again", "record_taps"), ReferenceRayTrainer),
        (("draw_again", "record_taps", "keep_reference"), RayTrainer),
    ],
)
@pytest.mark.parametrize("entropy", [True, False])
def test_the_ranks_can_what_each_of_them_can(lacks: tuple[str, ...], kind: type[RayTrainer], entropy: bool) -> None:
    held = Drawing()
    held.lacks = lacks if entropy else (*lacks, "gives_entropy")
    trainer = ray_trainer(Crew([]), Abilities.of(held))
    assert type(trainer) is kind
    assert isinstance(trainer, EntropyTrainer) == entropy
    assert isinstance(trainer, DrawingTrainer) == (kind is DrawingRayTrainer)


def test_engines_draw_by_the_contract_when_each_of_them_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for held, draws in (
        (SimpleNamespace(), False),
        (SimpleNamespace(**dict.fromkeys(ROLLOUT, print), draws_by_contract=lambda: False), False),
        (SimpleNamespace(**dict.fromkeys(ROLLOUT, print), draws_by_contract=lambda: True), True),
    ):
        host = EngineHost()
        host._held = held
        assert host.draws_by_contract() is draws
    rollout, said = AlignedRayRollout(Crew([])), [True, False]
    rollout._crew.members = (member(0), member(1))
    monkeypatch.setattr(rollout._crew, "call", lambda method: said if method == "draws_by_contract" else [])
    with pytest.raises(
        ContractViolation, match=r"trainer rank 1 .* does not draw by the contract's draw, and trainer rank 0"
    ):
        rollout.draws_by_contract()
    said[1] = True
    assert rollout.draws_by_contract()
    said[:] = [False, False]
    assert not rollout.draws_by_contract()


def test_nothing_of_this_imports_ray() -> None:
    program = "import sys, vime_core.ray.launcher; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
