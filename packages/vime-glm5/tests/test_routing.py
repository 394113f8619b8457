"""The verdict on choices: agreement of each layer, and never a pass on nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime_core.errors import ConfigError
from vime_glm5.routing import Routing, expected_taps, routing_verdict, run
from vime_glm5.source import RandomGlm5Options, configuration
from vime_glm5.structure import read_shape


def taps(**rows: list[list[float]]) -> Any:
    return {
        f"layers.{name[-1]}.{name[:-2]}": (torch.arange(len(values)), torch.tensor(values))
        for name, values in rows.items()
    }


def test_agreement_is_counted_by_layer() -> None:
    found = Routing(tokens=2)
    ours = taps(chosen_keys_0=[[0.0, 1.0], [1.0, 2.0]], router_slots_3=[[4.0, 5.0], [6.0, 7.0]])
    theirs = taps(chosen_keys_0=[[0.0, 1.0], [1.0, 2.0]], router_slots_3=[[5.0, 4.0], [6.0, 7.0]])
    found.add(theirs, ours)
    verdict = routing_verdict(found, 1)
    assert verdict.exit_code == 1
    assert verdict.first == "layers.3.router_slots"
    assert verdict.details["agreement"] == {"layers.0.chosen_keys": 1.0, "layers.3.router_slots": 0.5}
    assert verdict.unequal == 2


def test_a_place_without_a_choice_is_not_counted() -> None:
    found = Routing(tokens=3)
    engine = taps(chosen_keys_0=[[0.0, -1.0], [0.0, 1.0], [0.0, -1.0]])
    trainer = taps(chosen_keys_0=[[0.0, -1.0], [0.0, 1.0], [1.0, 2.0]])
    found.add(engine, trainer)
    verdict = routing_verdict(found, 1)
    assert verdict.details["compared"] == 5
    assert (verdict.exit_code, verdict.unequal) == (1, 2)
    assert verdict.details["agreement"] == {"layers.0.chosen_keys": 0.6}


def test_all_equal_holds() -> None:
    found = Routing(tokens=2)
    same = taps(router_slots_3=[[4.0, 5.0]])
    found.add(same, same)
    assert routing_verdict(found, 1).exit_code == 0


def test_what_one_side_lacks_is_no_agreement() -> None:
    for engine in ({}, taps(router_slots_3=[[4.0, 5.0]])):
        found = Routing(tokens=2)
        found.add(engine, taps(router_slots_3=[[4.0, 5.0], [1.0, 2.0]]))
        assert routing_verdict(found, 1).exit_code == 3
    assert routing_verdict(Routing(), 0).exit_code == 3


def test_a_tap_that_the_trainer_lacks_is_no_agreement() -> None:
    found = Routing(tokens=2)
    both = taps(router_slots_3=[[4.0, 5.0]])
    found.add(both | taps(router_slots_4=[[4.0, 5.0]]), both)
    verdict = routing_verdict(found, 1)
    assert (verdict.exit_code, verdict.first) == (3, "tap 'layers.4.router_slots' is missing in the trainer")


def test_a_tap_that_both_sides_lack_is_no_agreement() -> None:
    found = Routing(expected=("layers.3.router_slots", "layers.4.router_slots"), tokens=2)
    same = taps(router_slots_3=[[4.0, 5.0]])
    found.add(same, same)
    verdict = routing_verdict(found, 1)
    assert (verdict.exit_code, verdict.first) == (
        3,
        "tap 'layers.4.router_slots' is missing in the engine and the trainer",
    )


def test_what_a_model_chooses_follows_from_its_shape() -> None:
    shape = read_shape(configuration(RandomGlm5Options()))
    assert expected_taps(shape) == (
        *("layers.0.chosen_keys", "layers.1.chosen_keys", "layers.2.chosen_keys"),
        *("layers.3.router_slots", "layers.4.router_slots", "layers.5.router_slots"),
    )


def test_rows_of_another_width_are_not_stretched() -> None:
    found = Routing(tokens=2)
    found.add(taps(router_slots_3=[[4.0]]), taps(router_slots_3=[[4.0, 4.0]]))
    assert routing_verdict(found, 1).exit_code == 3


def test_a_choice_that_leaves_nothing_out_tests_nothing() -> None:
    for queries, code in ((2, 3), (3, 0)):
        found = Routing(tokens=2)
        same = taps(chosen_keys_0=[[0.0, float(min(n, 1))] for n in range(queries)])
        found.add(same, same)
        assert found.left_out == queries - 2
        assert routing_verdict(found, 1).exit_code == code


def test_another_contract_is_refused() -> None:
    config: Any = SimpleNamespace(alignment=SimpleNamespace(contract="dense/v1"))
    plugins: Any = None
    with pytest.raises(ConfigError, match="VIME-CONFIG-090"):
        run(config, plugins)
