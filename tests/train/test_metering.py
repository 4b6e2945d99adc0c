"""``shoal train --memory``: what a step holds, against what the engine has and what a second meter counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from whole_runs import Shoal, events, make_store, sets, write_run

from shoal.comm.world import World
from shoal.config import load
from shoal.data_parallel.flat import Flat
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.memory.account import BACKWARD, BEFORE, FORWARD, PHASES, UPDATE, RankMemory, read
from shoal.meter import Meter, mark
from shoal.purposes import ACTIVATIONS, COMMUNICATION, GRADIENTS, LOGITS, OUTSIDE, PARAMETERS, STATES, WORKSPACE
from shoal.train.metering import Metering
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

RUNS = Path(__file__).parents[2] / "runs"
SMALL = 32768
"""Bytes of scalars, and of a batch."""


@contextmanager
def mislabelled(what: str | None) -> Iterator[None]:
    """Buckets say that their states are something else, if told."""
    truth = Flat._mark

    def wrong(flat: Flat) -> None:
        truth(flat)
        mark(what or STATES, *flat.states.values())

    Flat._mark = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        Flat._mark = truth  # type: ignore[method-assign]


def measure(
    world: World, line: str, steps: int = 2, *, wrong: str | None = None, vocabulary: int = 96
) -> dict[str, Any]:
    """One rank's memory; the peak by another meter, which knows nothing of phases; and the bytes that the engine's
    fragments lie in."""
    config = load(RUNS / "tiny.toml", ["model.layers=4", f"model.vocab={vocabulary}"])
    metering, other = Metering(Path()), Meter(meta=False)
    with mislabelled(wrong), other, metering.building():
        engine = make_engine(config, Layout.parse(line), world)
    metering.begin(engine, steps)
    source, lying = open_data(config), {}

    def reduced() -> None:
        lying[GRADIENTS] = bytes_of(one.tensor for one in engine.gradients())

    engine.on_gradients = reduced
    for step in range(steps):
        batch = source.batch(step, engine.mesh.coords["dp"], engine.layout.dp)
        with metering.around(step), other, other.phase(f"step {step}"):
            engine.step(batch)
    assert metering.found is not None
    lying[PARAMETERS], lying[STATES] = weights_and_states(engine)
    return {"memory": metering.found, "peak": other.peak(f"step {steps - 1}"), "lying": lying}


def weights_and_states(engine: Engine) -> tuple[int, int]:
    parameters = bytes_of(part for flat in engine._sync.flats for part in (flat.own_params,))
    masters = bytes_of(flat.masters for flat in engine._sync.flats if flat.mixed)
    states = bytes_of(one.tensor for one in engine._sync.states())
    return parameters, masters + states


def bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def check(found: dict[str, Any]) -> None:
    memory: RankMemory = found["memory"]
    assert tuple(memory.phases) == PHASES
    for phase, moment in memory.phases.items():
        for category, nbytes in found["lying"].items():
            if category != GRADIENTS:
                assert moment.device[category] == nbytes, f"{category} {phase}"
            elif phase == UPDATE:  # under ZeRO 2 and 3 some are whole, and on their way
                assert moment.device[category] >= nbytes
    # Between the phases of a step there is less than in them; from the steps before, some scalars are left.
    assert 0 <= found["peak"] - max(moment.total for moment in memory.phases.values()) < 1024
    before = memory.phases[BEFORE]
    assert set(before.device) <= {PARAMETERS, GRADIENTS, STATES, WORKSPACE}
    assert before.device.get(WORKSPACE, 0) < SMALL
    assert memory.phases[FORWARD].device.get(OUTSIDE, 0) < SMALL


@pytest.mark.parametrize(
    "line",
    [
        "dtype=float32",
        "dp=2,zero=1,dtype=bf16",
        "dp=2,zero=3,dtype=float64",
        "pp=2:zb-v,mb=4,dtype=bf16",
        pytest.param("tp=2,dtype=bf16", marks=pytest.mark.parity),
        pytest.param("dp=2,pp=2:1f1b,zero=2,mb=4,recompute=full,dtype=bf16", marks=pytest.mark.parity),
        pytest.param("pp=2:1f1b,mb=4,offload=activations:cpu,dtype=float32", marks=pytest.mark.parity),
    ],
)
def test_categories_are_what_the_engine_has_and_totals_what_another_meter_counts(line: str, pool: Pool) -> None:
    layout = Layout.parse(line)
    for found in pool.run(measure, line, ranks=layout.ranks):
        check(found)
        if layout.stages == 1:  # else some stage is done while others have passes to make
            assert found["memory"].phases[UPDATE].device.get(ACTIVATIONS, 0) < SMALL
        if layout.zero == 3:
            # No whole parameters in the update, only what a neighbour lends for the sum of a gradient.
            backward, update = (found["memory"].phases[phase].device for phase in (BACKWARD, UPDATE))
            assert backward[COMMUNICATION] > update.get(COMMUNICATION, 0)


@pytest.mark.parametrize("wrong", [GRADIENTS, PARAMETERS, ACTIVATIONS])
def test_a_wrong_mark_shows(wrong: str) -> None:
    found = measure(World(), "dtype=float32", wrong=wrong)
    with pytest.raises((AssertionError, KeyError)):
        check(found)


def test_logits_are_counted_as_such() -> None:
    found: RankMemory = measure(World(), "dtype=float32", vocabulary=512)["memory"]
    rows, vocabulary = 24 * 32, 512
    moment = found.phases[FORWARD]
    assert moment.device[LOGITS] in (rows * vocabulary * 4, 2 * rows * vocabulary * 4)


# ---- a whole run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


def test_a_run_leaves_the_memory_of_its_second_step(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, shoal = write_run(tmp_path, store), Shoal(capfd, monkeypatch)
    line = "pp=2:1f1b,mb=4,offload=activations:cpu"
    result = shoal("train", file, "--layout", line, "--memory", *sets(run__steps=3))
    assert (result.code, result.err) == (0, "")
    folder = tmp_path / "out" / "run"
    assert f"memory of step 2: {folder}/memory.json; shoal report {folder} --memory shows it" in result.out
    found = read(json.loads((folder / "memory.json").read_text(encoding="utf-8")))
    assert (found.step, [rank.name for rank in found.ranks]) == (2, ["rank 0 (pp 0)", "rank 1 (pp 1)"])
    assert all(rank.phases[BACKWARD].host > 0 for rank in found.ranks)
    (told,) = events(folder, "memory")
    assert told["bytes"] == max(moment.total for moment in found.moments) == sum(told["parts"].values())


def test_a_run_of_one_step_measures_that(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, shoal = write_run(tmp_path, store), Shoal(capfd, monkeypatch)
    for more in ((), ("--fresh",)):
        assert shoal("train", file, "--memory", *more, *sets(run__steps=1)).code == 0
        assert [one["step"] for one in events(tmp_path / "out" / "run", "memory")] == [1]
