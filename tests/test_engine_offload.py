"""What lives on the host or a disk: the same results, the bytes that it takes off the device, checkpoints, faults."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engine_ranks import Held, equal, held, put_together, weights
from precision_ranks import make, read, train

from shoal.comm.world import World
from shoal.config import Config
from shoal.errors import LayoutError, RankFailed, ShoalError
from shoal.layout import Layout
from shoal.meter import HOST, Meter
from shoal.optim.optimizers import Updater
from shoal.train.pool import Pool
from shoal.train.verify import verify

EVERYTHING = "optimizer:nvme+params:cpu@0.7+grads:cpu"


def losses(world: World, config: Config, line: str, steps: int) -> tuple[list[float], list[Held]]:
    engine = make(world, config, line)
    return [one.loss for one in train(engine, config, steps)], weights(engine)


@pytest.mark.parametrize("away", ["optimizer:cpu", f"{EVERYTHING}"])
def test_half_precision_trains_the_same_for_fifty_steps(away: str, pool: Pool) -> None:
    """To the bit, with clipping on."""
    config = read("optimizer.clip=0.3", "data.batch=4")
    ((here, all_here),) = pool.run(losses, config, "dtype=bf16,mb=2", 50, ranks=1)
    ((there, all_there),) = pool.run(losses, config, f"dtype=bf16,mb=2,offload={away}", 50, ranks=1)
    assert there == here
    full, other = put_together([all_here]), put_together([all_there])
    assert all(torch.equal(full[name], other[name]) for name in full)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
@pytest.mark.parametrize("line", ["dp=2,zero=3", pytest.param("pp=2,mb=2", marks=pytest.mark.parity)])
def test_every_optimizer_trains_the_same(name: str, line: str, pool: Pool) -> None:
    config = read(f"optimizer.name={name}", "optimizer.momentum=0.9", "optimizer.clip=0.3")
    away = EVERYTHING.replace("optimizer:nvme", "optimizer:cpu@0.6") if name == "muon" else EVERYTHING
    found = [pool.run(losses, config, f"{line},dtype=float64{more}", 4, ranks=2) for more in ("", f",offload={away}")]
    assert [ranks[0][0] for ranks in found][1] == pytest.approx(found[0][0][0], rel=1e-12)
    here, there = (put_together(one for _, one in ranks) for ranks in found)
    for key, values in here.items():
        torch.testing.assert_close(there[key], values, rtol=1e-10, atol=1e-12)


def test_weights_without_masters_round_alike_on_all_copies(pool: Pool) -> None:
    config = read("optimizer.rounding=stochastic", "model.tied=true")
    line = "dp=2,pp=2,mb=2,dtype=bf16,offload=optimizer:cpu@0.5"
    put_together(one for _, one in pool.run(losses, config, line, 3, ranks=4))


@pytest.mark.parametrize("line", ["offload=optimizer:cpu", "offload=optimizer:nvme+params:nvme+grads:cpu"])
def test_a_skipped_step_changes_nothing_and_scales_are_undone(line: str, pool: Pool) -> None:
    ((here, _),) = pool.run(overflowing, "dtype=fp16", ranks=1)
    ((there, unchanged),) = pool.run(overflowing, f"dtype=fp16,{line}", ranks=1)
    assert unchanged
    assert there == here


def overflowing(world: World, line: str) -> tuple[list[tuple[bool, float]], bool]:
    config = read("data.batch=4")
    engine = make(world, config, line)
    engine._guard.scale = 2.0**40
    before = weights(engine)
    first = train(engine, config, 1)
    unchanged = equal(before, weights(engine))
    assert first[0].skipped
    return [(one.skipped, one.loss) for one in train(engine, config, 32)], unchanged


# ---- clipping


def test_an_update_that_forgets_to_clip_is_caught(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    """In a worker that is forked with the fault."""
    config, layout = read("optimizer.clip=0.1", "data.batch=6"), Layout.parse("offload=optimizer:cpu,dtype=float64")
    update = Updater._update_shelf
    monkeypatch.setattr(Updater, "_update_shelf", lambda self, runs, lr, factor: update(self, runs, lr, 1.0))
    with Pool(1) as forgetful:
        report = verify(config, layout, forgetful, 3)
    assert any(fault.startswith("weight ") for fault in report.faults)
    assert verify(config, layout, pool, 3).agree


# ---- bytes


def on_the_device(world: World, line: str) -> tuple[dict[str, int], int, int]:
    """By category, the most of a step after the first; that step's peak on the device, and how many parameters."""
    config = read("data.seq_len=8", "data.batch=2", "model.layers=4")
    engine = make(world, config, line)
    with Meter(apart=[HOST]) as meter:
        train(engine, config, 1)
        meter.label(HOST, engine.on_host())
        for flat in engine._sync.flats:
            meter.label("parameters", [flat.params, flat.own_params])
            meter.label("gradients", [flat.grads, flat.own_grads])
            if flat.masters.untyped_storage().data_ptr() != flat.own_params.untyped_storage().data_ptr():
                meter.label("optimizer", [flat.masters])
            meter.label("optimizer", [*flat.states.values()])
        with meter.phase("step"):
            train(engine, config, 1)
        between = meter.snapshot()
        return between, meter.peak("step"), sum(one.numel() for one in engine.task.module.parameters())


def test_what_is_away_is_not_on_the_device(pool: Pool) -> None:
    """float32: per parameter 4 bytes, 4 of gradients, 8 of moments; masters besides under bf16, whose parameters take
    2."""

    def measured(line: str) -> tuple[dict[str, int], int, int]:
        ((between, peak, psi),) = pool.run(on_the_device, line, ranks=1)
        return between, peak, psi

    here, peak, psi = measured("dtype=bf16")
    assert here["optimizer"] == 12 * psi
    assert HOST not in here
    there, less, _ = measured("dtype=bf16,offload=optimizer:cpu")
    assert there.get("optimizer", 0) == 0
    assert there["parameters"] == 2 * psi
    assert 12 * psi <= there[HOST] < 1.1 * 18 * psi
    assert less < peak - 11.9 * psi
    half, _, _ = measured("dtype=bf16,offload=optimizer:cpu@0.5")
    assert half["optimizer"] == pytest.approx(6 * psi, rel=0.01)
    disk, least, _ = measured("dtype=bf16,offload=optimizer:nvme+params:nvme+grads:cpu")
    assert disk.get("optimizer", 0) == disk.get("parameters", 0) == disk.get("gradients", 0) == 0
    assert least < less - 2 * psi


def test_parameters_are_whole_for_two_layers_alone(pool: Pool) -> None:
    ((most, layers),) = pool.run(most_open, "offload=params:cpu", ranks=1)
    assert 0 < most <= max(a + b for a, b in pairwise(layers))
    assert most < sum(layers) / 2


def most_open(world: World, line: str) -> tuple[int, list[int]]:
    """The most parameters that have memory on the device at once, and those of each bucket, in order."""
    config = read("model.layers=6")
    engine, most = make(world, config, line), 0
    assert engine._sync._visits is not None
    fetch = engine._sync._visits._fetch

    def fetching(number: int) -> None:
        nonlocal most
        fetch(number)
        most = max(most, sum(flat.params.untyped_storage().nbytes() for flat in engine._sync.flats) // 4)

    engine._sync._visits._fetch = fetching  # type: ignore[method-assign]
    train(engine, config, 2)
    return most, [flat.params.numel() for flat in engine._sync.flats]


# ---- checkpoints


def saved(world: World, line: str, folder: Path, start: Path | None) -> tuple[list[float], list[Held]]:
    config = read("optimizer.clip=0.3", "data.batch=12")
    engine = make(world, config, line)
    if start is not None:
        engine.load(start)
    found = [one.loss for one in train(engine, config, 2)]
    engine.save(folder)
    return found, [one for kind in ("weight", "exp_avg", "exp_avg_sq") for one in held(engine.fragments(), kind)]


@pytest.mark.parametrize(
    "path",
    [
        ["offload=optimizer:nvme+params:nvme", "dp=2,zero=3,offload=optimizer:cpu@0.3", "tp=2,pp=2,mb=2"],
        pytest.param(["dp=1", "dp=4,zero=1,offload=optimizer:nvme@0.7+grads:cpu"], marks=pytest.mark.parity),
        pytest.param(
            ["pp=2,mb=2,offload=params:nvme@0.5", "tp=2:1d-sp,offload=optimizer:nvme"], marks=pytest.mark.parity
        ),
    ],
)
def test_a_checkpoint_goes_anywhere(path: list[str], pool: Pool, tmp_path: Path) -> None:
    """Under each layout in turn, what one process without any of it would have done."""
    at: dict[str, Path | None] = {"away": None, "here": None}
    for number, line in enumerate(path):
        found = {}
        for kind, layout in (("away", f"{line},dtype=float64"), ("here", "dtype=float64")):
            to = tmp_path / f"{kind}{number}"
            found[kind] = pool.run(saved, layout, to, at[kind], ranks=Layout.parse(layout).ranks)
            at[kind] = to
        assert found["away"][0][0] == pytest.approx(found["here"][0][0], rel=1e-10)


def test_what_is_copied_into_a_parameter_reaches_its_master(pool: Pool) -> None:
    (zeros,) = pool.run(overwritten, "dtype=bf16,offload=optimizer:nvme@0.6", ranks=1)
    assert zeros


def overwritten(world: World, line: str) -> bool:
    config = read()
    engine = make(world, config, line)
    train(engine, config, 1)
    name, parameter = next((n, p) for n, p in engine.task.module.named_parameters() if n.endswith("norm.weight"))
    with torch.no_grad():
        parameter.fill_(0.5)
    return all((one.values == 0.5).all() for one in weights(engine) if one.name == name)


# ---- what is refused, and faults


@pytest.mark.parametrize(
    ("line", "settings", "words"),
    [
        ("offload=optimizer:nvme", ["optimizer.name=muon"], ["optimizer:nvme", "Muon", "use offload=optimizer:cpu"]),
        ("pp=2:2bw,mb=2,offload=params:cpu", [], ["2bw has several versions of params", "use offload=optimizer:cpu"]),
        ("pp=2:pipedream,offload=grads:cpu", [], ["layout.offload = grads:cpu", "use offload=optimizer:cpu"]),
    ],
)
def test_what_cannot_be_is_refused(line: str, settings: list[str], words: list[str], pool: Pool) -> None:
    with pytest.raises((LayoutError, RankFailed)) as error:
        pool.run(losses, read(*settings), str(Layout.parse(line)), 1, ranks=1)
    for word in words:
        assert word in str(error.value)


def test_a_disk_without_room_is_found_before_the_first_step(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ShoalError, match="cannot be had: No space left on device") as error, Pool(2) as workers:
        workers.run(losses, read(), "dp=2,zero=1,offload=optimizer:nvme", 1, ranks=2)
    assert "memory.swap" in str(error.value)


@pytest.mark.parametrize("what", ["truncated", "full"])
def test_a_disk_that_fails_in_a_step_ends_it_on_all_ranks(what: str, pool: Pool) -> None:
    with pytest.raises(ShoalError) as error, Pool(2) as workers:
        workers.run(failing, what, ranks=2, timeout_s=20)
    said = {"truncated": "the swap file ends at byte", "full": "No space left on device"}[what]
    assert said in str(error.value)
    assert "memory.swap" in str(error.value)


def failing(world: World, what: str) -> None:
    config = read()
    engine = make(world, config, "dp=2,zero=1,offload=optimizer:nvme")
    train(engine, config, 1)
    away = engine._sync._sharing.away
    assert away is not None
    swap = away.homes._swap  # type: ignore[union-attr]
    if world.rank == 1:
        if what == "truncated":
            os.ftruncate(swap._file.fileno(), 4096)
        else:
            swap._move = no_room(swap._move)
    train(engine, config, 1)


def no_room(move: object) -> object:
    def moving(call: object, data: object, offset: int) -> None:
        def fails(*_: object) -> int:
            raise OSError(28, os.strerror(28))

        move(fails if call is os.pwritev else call, data, offset)  # type: ignore[operator]

    return moving


def test_nothing_is_left_on_disk(pool: Pool, tmp_path: Path) -> None:
    config = read(f"memory.swap={tmp_path}")
    pool.run(losses, config, "offload=optimizer:nvme", 2, ranks=1)
    assert list(tmp_path.iterdir()) == []
