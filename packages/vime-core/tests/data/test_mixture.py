from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vime_core.data.mixture import MixtureOptions, open_mixture, shares


def file(directory: Path, name: str, count: int) -> Path:
    path = directory / f"{name}.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{name} {i}", "answer": f"#### {i}"}) + "\n" for i in range(count))
    )
    return path


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 500))
def test_shares_sum_and_are_within_one_of_the_quota(weights: list[float], size: int) -> None:
    counts = shares(weights, size)
    assert sum(counts) == size
    assert all(abs(count - size * w / sum(weights)) < 1 for count, w in zip(counts, weights, strict=True))


def test_an_epoch_holds_each_file_in_its_share(tmp_path: Path) -> None:
    options = MixtureOptions.model_validate(
        {
            "size": 12,
            "sources": (
                {"path": file(tmp_path, "a", 3), "weight": 3.0},
                {"path": file(tmp_path, "b", 10), "weight": 1.0},
            ),
        }
    )
    dataset = open_mixture(options)
    assert len(dataset) == 12
    questions = [dataset[i].messages[0].content for i in range(12)]
    assert Counter(q[0] for q in questions) == {"a": 9, "b": 3}
    assert Counter(questions)["a 0"] == 3  # the smaller file comes round again
    assert dataset[1].label == "1"


def test_without_a_size_an_epoch_is_as_long_as_all_files(tmp_path: Path) -> None:
    sources = ({"path": file(tmp_path, "a", 3)}, {"path": file(tmp_path, "b", 5)})
    assert len(open_mixture(MixtureOptions.model_validate({"sources": sources}))) == 8


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"neither .jsonl nor .parquet"):
        MixtureOptions.model_validate({"sources": ({"path": tmp_path / "x.csv"},)})
