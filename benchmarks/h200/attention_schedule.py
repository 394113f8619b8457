"""Does FA3 give the same bits with its schedule made once a step, and is a step of 24 layers the faster for it?

    python attention_schedule.py [--layout HEAD,HEADS,KV ...]

Without a schedule every call begins with a small kernel that makes one, which the attention need not wait for to be
launched (programmatic dependent launch). With one, the library's sources (vLLM's fork, hopper/flash_api.cpp) launch the
attention alone, and with a single split clear the schedule's counter by a fill behind it: as many kernels as before.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from attention_phases import LAYOUTS, Layout, Sequences, make_sequences
from fa3 import QUERY_BOUND_FLOOR, Fa3, Paged
from measure import attempt, graph_us, table, unequal_rows

LAYERS = 24
FA3 = Fa3(floor=QUERY_BOUND_FLOOR)
Parts = list[tuple[int, int, int]]


def batches() -> dict[str, tuple[list[int], Parts]]:
    """Name -> lengths of the sequences in the cache, and what is asked of them: (sequence, first query, end)."""
    found: dict[str, tuple[list[int], Parts]] = {}
    for count in (1, 2, 3, 4, 5, 8, 31, 32, 64, 129, 300):
        equal, mixed = [1024] * count, [1 + 37 * i % 1500 for i in range(count)]
        for name, lengths in (("1024 keys", equal), ("1 to 1500 keys", mixed)):
            found[f"decode of {count}, {name}"] = lengths, [(i, n - 1, n) for i, n in enumerate(lengths)]
    lengths = [900, 700, 64, 300, 129, 5]
    decodes = [(i, n - 1, n) for i, n in enumerate(lengths)]
    found["chunk of 512 among decodes"] = lengths, [*decodes[1:], (0, 388, 900)]
    found["chunk of 7 among decodes"] = lengths, [(0, 893, 900), *decodes[1:]]
    found["prefill of 6"] = lengths, [(i, 0, n) for i, n in enumerate(lengths)]
    return found


def padded(batch: Paged) -> Paged:
    """The batch as a decode graph has it: two requests more, which ask nothing of nothing."""
    end = batch.query_starts[-1:]
    return Paged(
        torch.cat([batch.query_starts, end, end]),
        torch.cat([batch.seq_lens, torch.zeros_like(batch.seq_lens[:1]).expand(2)]),
        torch.cat([batch.block_table, batch.block_table[:1].expand(2, -1)]),
        batch.max_query,
        batch.max_keys,
    )


def unequal(data: Sequences, parts: Parts) -> int:
    """Rows that differ with a schedule made ahead, used once and a second time, and where the batch is padded."""
    q, batch = data.queries(parts)
    want = FA3.paged(q, data.k_pages, data.v_pages, batch)
    total = 0
    for asked in (batch, padded(batch)):
        schedule = FA3.schedule(q, data.k_pages, asked)
        for _ in range(2):
            total += unequal_rows(FA3.paged(q, data.k_pages, data.v_pages, asked, schedule), want)[0]
    return total


def step_us(sets: list[Sequences], parts: Parts, *, ahead: bool) -> float:
    """Of the attentions of a step, all layers in one graph; layers take turns with the keys of ``sets``."""
    inputs = [(*data.queries(parts), data) for data in sets]

    def step() -> None:
        q, batch, data = inputs[0]
        schedule = FA3.schedule(q, data.k_pages, batch) if ahead else None
        for layer in range(LAYERS):
            q, batch, data = inputs[layer % len(inputs)]
            FA3.paged(q, data.k_pages, data.v_pages, batch, schedule)

    return graph_us([step])


def rows_of(layout: Layout, name: str, lengths: list[int], parts: Parts) -> list[list[object]]:
    rows: list[list[object]] = []
    for page in (16, 128):
        sets = [make_sequences(layout, page, lengths, seed) for seed in range(4)]
        times = [step_us(sets, parts, ahead=ahead) for ahead in (False, True)]
        rows.append([name, page, unequal(sets[0], parts), *times, times[0] / times[1]])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", nargs="*", default=LAYOUTS)
    head = ["batch", "page", "unequal rows", f"us of {LAYERS} layers", "with one schedule", "speed"]
    for text in parser.parse_args().layout:
        layout = Layout(*map(int, text.split(",")))
        calls = {name: partial(rows_of, layout, name, *batch) for name, batch in batches().items()}
        rows = [row for name, call in calls.items() for row in attempt(name, call) or []]
        table(f"{layout}: FA3's schedule made ahead", head, rows)


if __name__ == "__main__":
    main()
