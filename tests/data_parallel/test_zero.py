"""When the parameters of a unit are whole, under ZeRO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replicas import by_hand, make

from shoal.comm.world import World
from shoal.data_parallel import sync as sync_module
from shoal.data_parallel.flat import is_open
from shoal.data_parallel.zero import ZeroThree
from shoal.errors import ConfigError
from shoal.mesh import Mesh
from shoal.train.pool import Pool

SHAPES = {f"w{unit}": (3, 3) for unit in range(4)}
USES = {
    "own": {unit: [f"w{unit}"] for unit in range(4)},
    "shared": {0: ["w0"], 1: ["w1"], 2: ["w0", "w2"], 3: ["w2", "w3"]},
}
"""Which parameters each unit uses; the first to use one owns it."""


class Watched:
    """Four units of one matrix each, on two ranks: what is whole after each call."""

    def __init__(self, world: World, uses: str, resident: bool) -> None:
        mesh = Mesh((("dp", 2),), world)
        self.held = by_hand(mesh, SHAPES)
        for name, one in self.held.items():
            one.parameter.data = torch.arange(9.0).view(3, 3).double() + 10 * int(name[-1])
        sync = make("zero3", list(self.held.values()), mesh, uses=USES[uses], resident=resident)
        assert isinstance(sync, ZeroThree)
        self.sync, self.uses, self.ledger = sync, USES[uses], world.ledger
        self.seen: list[tuple[str, str]] = []

    def opened(self, call: str) -> None:
        units = sorted(flat.bucket.name[-1] for flat in self.sync.flats if is_open(flat.params))
        self.seen.append((call, "".join(units)))

    def check_values(self, unit: int) -> None:
        """What a unit uses may be read once it is entered."""
        for name in self.uses[unit]:
            expected = torch.arange(9.0).view(3, 3).double() + 10 * int(name[-1])
            assert torch.equal(self.held[name].parameter, expected), f"{name} is not there"

    def forward(self) -> None:
        for unit in range(4):
            self.sync.enter_unit(unit, backward=False)
            self.check_values(unit)
            self.opened(f"F{unit}")
            self.sync.leave_unit(unit)
            self.opened(f"f{unit}")

    def backward(self, final: bool, stop: int = 0) -> None:
        """Below unit ``stop`` no gradient arrives: units are done that were not entered."""
        for unit in reversed(range(4)):
            if unit >= stop:
                self.sync.enter_unit(unit, backward=True)
                self.check_values(unit)
                self.opened(f"B{unit}")
            self.sync.unit_done(unit, final)
            self.opened(f"b{unit}")

    def end(self) -> None:
        self.sync.reduce(self.sync.units)
        self.sync.finish()
        self.sync.updated()
        self.opened("end")

    def take(self) -> str:
        """What was seen since the last time, as ``call:units that are whole``."""
        seen, self.seen = " ".join(f"{call}:{whole}" for call, whole in self.seen), []
        return seen


def watch(world: World, uses: str, resident: bool) -> dict[str, tuple[str, int]]:
    """What is whole, and how many parameters' buckets were gathered, in each pass."""
    watched, results = Watched(world, uses, resident), {}
    sync = watched.sync

    def note(name: str) -> None:
        results[name] = watched.take(), world.ledger.calls("dp", "parameters")
        world.ledger.clear()

    world.ledger.clear()
    watched.opened("start")
    watched.forward()
    note("without gradients")
    sync.release()
    watched.opened("release")
    note("released")
    sync.begin()
    watched.forward()
    note("forward")
    watched.backward(final=False)
    note("backward")
    watched.forward()
    note("next forward")
    watched.backward(final=True)
    note("last backward")
    watched.end()
    note("end")
    sync.begin()
    watched.forward()
    note("forward")
    watched.backward(final=True, stop=3)
    watched.end()
    note("cut short")
    return results


CASES = {
    ("own", False): {
        "without gradients": ("start: F0:01 f0:1 F1:12 f1:2 F2:23 f2:3 F3:3 f3:", 4),
        "released": ("release:", 0),
        "forward": ("F0:01 f0:1 F1:12 f1:2 F2:23 f2:3 F3:3 f3:3", 4),
        "backward": ("B3:23 b3:2 B2:12 b2:1 B1:01 b1:0 B0:0 b0:0", 3),
        "next forward": ("F0:01 f0:1 F1:12 f1:2 F2:23 f2:3 F3:3 f3:3", 3),
        "last backward": ("B3:23 b3:2 B2:12 b2:1 B1:01 b1:0 B0:0 b0:", 3),
        "end": ("end:", 0),
        "cut short": ("B3:23 b3:2 b2:2 b1:2 b0:2 end:", 1),
    },
    ("shared", False): {  # the first and the third stay until their owners are done for the last time
        "without gradients": ("start: F0:01 f0:01 F1:012 f1:02 F2:023 f2:023 F3:023 f3:02", 4),
        "released": ("release:", 0),
        "forward": ("F0:01 f0:01 F1:012 f1:02 F2:023 f2:023 F3:023 f3:023", 4),
        "backward": ("B3:023 b3:02 B2:012 b2:012 B1:012 b1:02 B0:02 b0:02", 1),
        "next forward": ("F0:012 f0:012 F1:012 f1:02 F2:023 f2:023 F3:023 f3:023", 2),
        "last backward": ("B3:023 b3:02 B2:012 b2:01 B1:01 b1:0 B0:0 b0:", 1),
        "end": ("end:", 0),
        "cut short": ("B3:023 b3:02 b2:0 b1:0 b0: end:", 0),
    },
    ("own", True): {
        "without gradients": ("start: F0:01 f0:01 F1:012 f1:012 F2:0123 f2:0123 F3:0123 f3:0123", 4),
        "released": ("release:", 0),
        "forward": ("F0:01 f0:01 F1:012 f1:012 F2:0123 f2:0123 F3:0123 f3:0123", 4),
        "backward": ("B3:0123 b3:0123 B2:0123 b2:0123 B1:0123 b1:0123 B0:0123 b0:0123", 0),
        "next forward": ("F0:0123 f0:0123 F1:0123 f1:0123 F2:0123 f2:0123 F3:0123 f3:0123", 0),
        "last backward": ("B3:0123 b3:012 B2:012 b2:01 B1:01 b1:0 B0:0 b0:", 0),
        "end": ("end:", 0),
        "cut short": ("B3:0123 b3:012 b2:01 b1:0 b0: end:", 0),
    },
}


@pytest.mark.parametrize(("uses", "resident"), CASES)
def test_parameters_are_whole_while_they_are_used_and_the_next_are_fetched_meanwhile(
    pool: Pool, uses: str, resident: bool
) -> None:
    """Capitals enter a unit, small letters leave it; then the units that are whole or on their way. The last stays
    between the passes of a micro-batch, the first between micro-batches."""
    for results in pool.run(watch, uses, resident, ranks=2, timeout_s=20):
        assert results == CASES[uses, resident]


# ---- stages 1 and 2: parameters that are gathered while others are updated, and under the next forward pass


def ahead(world: World, kind: str) -> dict[str, object]:
    """Two units of a matrix each are updated in turn; what is there of their parameters, and when."""
    mesh = Mesh((("dp", 2),), world)
    held = by_hand(mesh, {"w0": (3, 3), "w1": (3, 3)})
    sync = make(kind, list(held.values()), mesh, cap_bytes=1)
    gathered: list[str] = []
    start = sync_module.start_all_gather

    def noted(out: torch.Tensor, *rest: Any) -> Any:
        gathered.extend(flat.bucket.name for flat in sync.flats if flat.params is out)
        return start(out, *rest)

    def seen() -> list[list[float]]:
        return [sorted(set(one.parameter.nan_to_num(-1.0).flatten().tolist())) for one in held.values()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_module, "start_all_gather", noted)
        sync.begin()
        sync.reduce(sync.units)
        sync.finish()
        found: dict[str, object] = {"turns": [(run.key.partition("/")[0], run.turn) for run in sync.runs()]}
        for turn in range(2):
            for run in sync.runs():
                if run.turn == turn:
                    run.params.fill_(turn + 1.0)
            sync.publish(turn)
            found[f"published {turn}"] = list(gathered), seen()
        sync.updated(ahead=True)
        found["updated"] = seen()
        sync.begin()
        sync.enter_unit(0, backward=False)
        found["entered 0"] = seen()
        sync.check()
        sync.enter_unit(1, backward=False)
        found["entered 1"] = seen()
        sync.published()
        found["published again"] = len(gathered), seen()
        sync.settle()
        found["settled"] = seen()
        sync.published()
        list(sync.weights())
        found["read"] = seen()
        sync.published()
        held["w1"].parameter.data = torch.ones(3, 3).double()
        try:
            sync.settle()
        except ConfigError as error:
            found["given other memory"] = str(error)
    return found


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_a_unit_waits_for_the_parameters_that_are_gathered_while_others_are_updated(kind: str, pool: Pool) -> None:
    """Those of the first unit first; what has not arrived is NaN (−1 here), never old or half of it new."""
    there = [[1.0], [2.0]]
    for found in pool.run(ahead, kind, ranks=2, timeout_s=20):
        assert "w1 was given other memory" in found.pop("given other memory")
        assert found == {
            "turns": [("w1", 1), ("w0", 0)],
            "published 0": (["w0"], [[-1.0], [0.0]]),
            "published 1": (["w0", "w1"], [[-1.0], [-1.0]]),
            "updated": [[-1.0], [-1.0]],
            "entered 0": [[1.0], [-1.0]],
            "entered 1": there,
            "published again": (4, [[-1.0], [-1.0]]),
            "settled": there,
            "read": there,
        }
