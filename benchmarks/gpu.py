"""What the contract costs on a GPU: rollout, train step, weight update and whole step beside stock, in one run.

    python benchmarks/gpu.py [CONFIG ...] [--model Qwen2.5-0.5B] [--requests 1,64,256] [--rounds 3] [--set KEY=VALUE]
                             [--sides stock,own,auto] [--one-by-one] [--profile]

Stock is vLLM in its fastest mode (policy ``off``: full decode graphs, no Inductor) and Megatron's own modules with
torch's flash attention over whole packs; the others are the contract dense/v1 with the provider ``cuda`` under the
policy ``reproducible``, with its own kernels (``own``), with DeepGEMM for linears (``linear``: the same bits) or with
whatever is offered (``auto``). Each has a process of its own with its engine and its trainer; they take turns on the
same GPU, or come one after the other (``--one-by-one``) where they do not fit together, and medians are compared. At
most two start at once. A request is 64 random tokens and 128 more; weights are random (benchmarks/shapes.py). Qwen3-4B
with all layers needs ``--one-by-one`` and ``--set trainer.token_budget=2048``.

The row "train each" is a train step whose attention is one call of the flash kernel a sequence; only stock has it.
"digests" is what share of a step's time the digests of weights, gradients and optimizer state take, which a record
keeps. What was measured is printed round by round, and the table also where a side fails.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine_profile import kernels_of
from shapes import write_model

ROOT = Path(__file__).resolve().parent.parent
PROMPT, ANSWER = 64, 128
CONTRACT = ["run.policy='reproducible'", "alignment.contract='dense/v1'", "alignment.provider='cuda'"]
STOCK = "stock"
SIDES = {
    STOCK: ["run.policy='off'", "alignment.contract=''"],
    "own": [*CONTRACT, "alignment.linear='own'", "alignment.attention='own'"],
    "linear": [*CONTRACT, "alignment.linear='auto'", "alignment.attention='own'"],
    "auto": [*CONTRACT, "alignment.linear='auto'", "alignment.attention='auto'"],
}
AT_ONCE = 2  # starts: more of them starve each other's compilers
LAST_S = 15.0  # for all sides to end


def overrides(model: Path, most: int, kv_gib: float) -> list[str]:
    return [
        "model.source='directory'", f"model.directory.path='{model}'", "rollout.context_length=1024",
        f"rollout.vllm.max_num_seqs={most}", f"rollout.vllm.kv_cache_gib={kv_gib}", "trainer.token_budget=8192",
        "trainer.lr=1e-5", f"sampling.max_tokens={ANSWER}",
    ]  # fmt: skip


def serve(pipe: Connection, files: list[Path], settings: list[str]) -> None:
    """Open both sides, then do what the other end asks for, and answer with seconds and tokens."""
    from vime_core.config.load import load_config
    from vime_core.loop.sides import checked_policy, open_sides, ready_parts

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    try:
        config, plugins = load_config(files, settings)
        parts = ready_parts(config, checked_policy(config, plugins), plugins)
        with open_sides(parts) as sides:
            worker = Worker(sides)
            pipe.send(None)
            while (asked := pipe.recv()) is not None:
                name, *arguments = asked
                pipe.send(getattr(worker, name)(*arguments))
    except Exception as error:
        pipe.send(Failed("".join(traceback.format_exception(error))))


@dataclass(frozen=True)
class Failed:
    """What a side answers when it ends by an error."""

    traceback: str


class SideError(Exception):
    """A side ended by an error."""


class Worker:
    """The work of one side."""

    def __init__(self, sides: Any) -> None:
        self.sides, self.version, self.step = sides, 0, 0
        self.weights_gb = 0.0
        self.last: tuple[list[Any], list[Any]] = ([], [])

    def rollout(self, count: int) -> float:
        """Tokens a second of ``count`` requests at once."""
        from vime_core.types import SampleRequest

        draw = random.Random(self.step)
        self.step += 1
        requests = [
            SampleRequest(i, 0, tuple(draw.randrange(3, 900) for _ in range(PROMPT)), seed=1000 * self.step + i,
                          max_tokens=ANSWER, temperature=1.0)
            for i in range(count)
        ]  # fmt: skip
        start = time.perf_counter()
        completions = self.sides.rollout.generate(requests)
        elapsed = time.perf_counter() - start
        self.last = requests, completions
        return sum(len(c.tokens) for c in completions) / elapsed

    def train(self) -> float:
        """Tokens a second of one optimizer step on the last rollout, its scoring included."""
        from vime_core.verify.live import take_step

        requests, completions = self.last
        start = time.perf_counter()
        take_step(self.sides, requests, completions, self.version)
        tokens = sum(len(r.prompt_tokens) for r in requests) + sum(len(c.tokens) for c in completions)
        return tokens / (time.perf_counter() - start)

    def train_each(self) -> float:
        """`train` with one attention call a sequence."""
        from vime_megatron import attention

        usual, attention.takes_packs = attention.takes_packs, lambda _: False
        try:
            return self.train()
        finally:
            attention.takes_packs = usual

    def update(self) -> float:
        """GB a second of a weight update."""
        self.version += 1
        self.weights_gb = self.weights_gb or sum(t.nbytes for _, t in self.sides.trainer.weights()) / 1e9
        start = time.perf_counter()
        self.sides.rollout.update_weights(self.sides.trainer.weights(), self.version)
        return self.weights_gb / (time.perf_counter() - start)

    def whole(self, count: int) -> float:
        """Tokens a second of rollout, optimizer step and update together."""
        start = time.perf_counter()
        self.rollout(count)
        self.train()
        self.update()
        return sum(len(c.tokens) for c in self.last[1]) / (time.perf_counter() - start)

    def digests(self, count: int) -> float:
        """Percent of a whole step that the digests of gradients, weights and optimizer state take."""
        import torch

        from vime_core.verify import live

        spent, usual = 0.0, live.digest_tensors

        def timed(named: Any) -> dict[str, str]:
            nonlocal spent
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            found = usual(named)
            spent += time.perf_counter() - start
            return found

        start = time.perf_counter()
        live.digest_tensors = timed
        try:
            self.whole(count)
        finally:
            live.digest_tensors = usual
        timed(self.sides.trainer.weights())
        timed(self.sides.trainer.optimizer_state())
        return 100 * spent / (time.perf_counter() - start)

    def profile_train(self, rows: int) -> str:
        """The kernels on which a train step spends most of the GPU's time."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            start = time.perf_counter()
            self.train()
            elapsed = time.perf_counter() - start
        kernels = kernels_of(found)
        busy = sum(event.self_device_time_total for event in kernels) / 1e3
        lines = [f"train step {elapsed * 1e3:.0f} ms (profiled), of it kernels {busy:.0f} ms"]
        for event in kernels[:rows]:
            share = event.self_device_time_total / 1e3
            lines.append(f"  {share:>9.2f} ms {share / busy:>6.1%} {event.count:>6} x {event.key[:70]}")
        return "\n".join(lines)

    def profile_rollout(self, count: int, rows: int) -> str:
        """Where a decode step of ``count`` requests spends its time: the host's first, then the GPU's by kernel."""
        found: list[str] = []
        for kernels in (False, True):
            self.sides.rollout.call("engine_profile:begin", count, kernels)
            self.rollout(count)
            found += self.sides.rollout.call("engine_profile:end", rows)
        return f"rollout of {count}: " + "\n".join(found)

    def profile_update(self) -> str:
        """Where a weight update's time goes: what the driver waits for, by call, and the rest."""
        engine, spent = self.sides.rollout.engine, dict[str, float]()
        usual = engine.call

        def timed(what: str, function: Any) -> Any:
            start = time.perf_counter()
            try:
                return usual(what, function)
            finally:
                spent[what] = spent.get(what, 0.0) + time.perf_counter() - start

        engine.call = timed
        start = time.perf_counter()
        try:
            self.update()
        finally:
            engine.call = usual
        whole = time.perf_counter() - start
        parts = [*spent.items(), ("(trainer's side)", whole - sum(spent.values()))]
        return f"update {whole * 1e3:.1f} ms: " + ", ".join(f"{name} {1e3 * t:.1f}" for name, t in parts)


class Side:
    """One configuration in its process."""

    def __init__(self, name: str, files: list[Path], settings: list[str]) -> None:
        self.name = name
        self.pipe, other = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(other, files, settings))
        self.process.start()
        other.close()

    def ask(self, *what: object) -> Any:
        """What `Worker` says. Raises SideError."""
        try:
            self.pipe.send(what)
        except OSError as error:
            raise SideError(f"{self.name}: its process ended before {what}") from error
        return self.answer()

    def answer(self) -> Any:
        try:
            found = self.pipe.recv()
        except EOFError as error:
            raise SideError(f"{self.name}: its process ended without a word") from error
        if isinstance(found, Failed):
            raise SideError(f"{self.name}: {found.traceback}")
        return found


def close(sides: Iterable[Side]) -> None:
    """End them together; one that does not end by itself is terminated, since nothing may wait for it."""
    sides, latest = list(sides), time.perf_counter() + LAST_S
    for side in sides:
        with contextlib.suppress(OSError):
            side.pipe.send(None)
    for side in sides:
        side.process.join(timeout=max(0.0, latest - time.perf_counter()))
        if side.process.is_alive():
            side.process.terminate()
            side.process.join()


@contextlib.contextmanager
def opened(names: list[str], files: list[Path], settings: dict[str, list[str]]) -> Generator[dict[str, Side]]:
    """The sides, ready; at most `AT_ONCE` start at once. All end with the block."""
    sides: dict[str, Side] = {}
    begun = time.perf_counter()
    try:
        for group in (names[i : i + AT_ONCE] for i in range(0, len(names), AT_ONCE)):
            sides |= {name: Side(name, files, settings[name]) for name in group}
            for name in group:
                sides[name].answer()
                print(f"{name}: ready after {time.perf_counter() - begun:.0f} s", flush=True)
        yield sides
    finally:
        close(sides.values())


def release_cache() -> None:
    """Leave the GPU's memory to the sides."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_rate() -> float:
    """GB a second that a device copy moves (bytes copied, not read plus written); NaN without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return float("nan")
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2**30 / 1e6 / statistics.median(times)


Task = tuple[object, ...]
Measured = dict[Task, dict[str, list[float]]]


def measure(sides: dict[str, Side], tasks: list[Task], rounds: int, measured: Measured) -> None:
    """Let the sides take turns, and keep what each round but the first gave."""
    for number in range(rounds + 1):
        for task in tasks:
            rates = {n: side.ask(*task) for n, side in sides.items() if task[0] != "train_each" or n == STOCK}
            if rates:
                print(
                    f"round {number}, {label(task)}: {', '.join(f'{n} {r:.1f}' for n, r in rates.items())}", flush=True
                )
            for name, rate in rates.items() if number else ():
                measured.setdefault(task, {}).setdefault(name, []).append(rate)


def label(task: Task) -> str:
    units = {"update": "GB/s", "digests": "% of a step"}
    return " ".join(map(str, task)).replace("_", " ") + ", " + units.get(str(task[0]), "tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path, default=[ROOT / "configs" / "aligned-smoke.toml"])
    parser.add_argument("--model", default="Qwen2.5-0.5B")
    parser.add_argument("--layers", type=int, help="build so many layers of the model only")
    parser.add_argument("--requests", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=8.0)
    parser.add_argument("--sides", default="stock,own", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--one-by-one", action="store_true", help="never hold two sides in the GPU's memory")
    parser.add_argument(
        "--profile", action="store_true", help="also print where rollout, update and train step spend their time"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    names = arguments.sides.split(",")
    if unknown := set(names) - set(SIDES):
        parser.error(f"--sides: {', '.join(sorted(unknown))} is none of {', '.join(SIDES)}")
    measured: Measured = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            compare(arguments, names, Path(folder), measured)
        except SideError as error:
            raise SystemExit(str(error)) from None
        finally:
            print_table(arguments.model, names, measured)


def compare(arguments: argparse.Namespace, names: list[str], folder: Path, measured: Measured) -> None:
    """Fill ``measured``. Raises SideError; what was measured before it stays."""
    sizes = [int(n) for n in arguments.requests.split(",")]
    step = min(64, max(sizes))
    tasks: list[Task] = [("rollout", n) for n in sizes]
    tasks += [("train",), ("train_each",), ("update",), ("whole", step), ("digests", step)]
    start = time.perf_counter()
    write_model(arguments.model, folder / arguments.model, arguments.layers)
    release_cache()
    print(f"weights written in {time.perf_counter() - start:.0f} s", flush=True)
    common = [*overrides(folder / arguments.model, max(sizes), arguments.kv_gib), *arguments.overrides]
    settings = {name: [*common, *SIDES[name], f"run.output='{folder}/{name}'"] for name in names}
    for group in [[name] for name in names] if arguments.one_by_one else [names]:
        with opened(group, arguments.configs, settings) as sides:
            measure(sides, tasks, arguments.rounds, measured)
            for name, side in sides.items() if arguments.profile else ():
                asked = [*(("profile_rollout", n, 14) for n in sizes), ("profile_update",), ("profile_train", 14)]
                for what in asked:
                    print(f"{name}: {side.ask(*what)}", flush=True)


def print_table(model: str, names: list[str], measured: Measured) -> None:
    """Medians of every side, and what each but stock's is of stock's."""
    others = [name for name in names if name != STOCK]
    head = [*names, *(f"{name}/stock" for name in others)]
    print(f"{model}, pid {os.getpid()}: medians\n{'':<28}{''.join(f'{title:>14}' for title in head)}")
    for task, rates in measured.items():
        medians = {name: statistics.median(found) for name, found in rates.items()}
        cells = [f"{medians[name]:.1f}" if name in medians else "" for name in names]
        both = [name in medians and STOCK in medians for name in others]
        cells += [f"{medians[n] / medians[STOCK]:.2f}" if b else "" for n, b in zip(others, both, strict=True)]
        print(f"{label(task):<28}{''.join(f'{cell:>14}' for cell in cells)}")
    if updates := measured.get(("update",)):
        cells = [f"{1e3 / statistics.median(updates[n]):.2f}" if n in updates else "" for n in names]
        print(f"{'update, ms a GB':<28}{''.join(f'{cell:>14}' for cell in cells)}")
    copied = copy_rate()
    print(f"a device copy: {copied:.0f} GB/s, {1e3 / copied:.2f} ms a GB", flush=True)


if __name__ == "__main__":
    main()
