"""Steps that overlap: when their results come, what skips them, and what ends them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import Held, equal, put_together, weights
from precision_ranks import make, read, train
from torch import Tensor, nn

from shoal.build import stages_of
from shoal.comm.world import World
from shoal.config import Config, Optimizer
from shoal.engine import Engine, StepResult
from shoal.errors import Diverged
from shoal.layout import Layout
from shoal.train import delayed
from shoal.train.pool import Pool
from shoal.train.setup import learning_rate, make_model, materialise_alone, open_data

LINES = (
    "pp=2:2bw,mb=2", "pp=4:2bw,mb=3", "pp=2:pipedream,mb=1", "pp=4:pipedream,mb=2", "pp=4:pipedream-vertical,mb=2",
    "dp=2,zero=1,pp=2:2bw,mb=2", "dp=2,zero=1,pp=2:pipedream-vertical,mb=2",
)  # fmt: skip
EXACT = 1e-12


def oracle(config: Config, line: str) -> delayed.DelayedTrainer:
    """The recurrence of a layout, in this process."""
    layout = Layout.parse(f"{line},dtype=float64")
    model = make_model(config, layout)
    materialise_alone(model, config.run.seed)
    common = model, config.optimizer, learning_rate(config), config.run.seed
    if layout.schedule == "2bw":
        return delayed.two_bw(*common)
    layers = model.layers()
    stages = {
        f"{layers[unit][0]}.{name}": stage
        for stage, units in enumerate(stages_of(layout, layers, model.roles))
        for unit in units
        for name, _ in layers[unit][1].named_parameters()
    }
    return delayed.pipedream(*common, stages, layout.mb, layout.dp, vertical="vertical" in layout.schedule)


def exact(*settings: str) -> Config:
    return read("model.layers=4", "data.batch=12", "optimizer.clip=0.1", *settings)


# ---- results


def reported(world: World, line: str, steps: int) -> tuple[list[StepResult | None], list[list[StepResult]]]:
    """What each step returned, and what has finished after every second step and after a drain."""
    config = exact()
    engine = make(world, config, f"{line},dtype=float64")
    returned, finished = [], []
    for number in range(steps):
        returned += train(engine, config, 1)
        if number % 2:
            finished.append(engine.finished())
    engine.drain()
    finished += [engine.finished(), engine.finished()]
    return returned, finished


@pytest.mark.parametrize(
    ("line", "behind"),
    [
        ("pp=2:2bw,mb=2", 3),
        ("pp=4:2bw,mb=3", 3),
        ("pp=4:pipedream,mb=2", 3),
        ("pp=4:pipedream,mb=1", 4),
        ("pp=2:pipedream,mb=4", 2),
        ("pp=2:zb-h1,mb=4", 0),
    ],
)
def test_a_result_comes_when_no_rank_works_on_its_step_any_more(line: str, behind: int, pool: Pool) -> None:
    """Until then a step returns None. Each comes once, in order, and a drain ends them all."""
    (first, *others) = pool.run(reported, line, 7, ranks=Layout.parse(line).ranks)
    returned, finished = first
    assert [one if one is None else one.step for one in returned] == [
        None if number < behind else number + 1 - behind for number in range(7)
    ]
    *during, drained, after = finished
    told = [one.step for part in finished for one in part]
    # Under a schedule without overlap only the newest result is kept.
    assert told == ([2, 4, 6, 7] if behind == 0 else list(range(1, 8)))
    assert len(drained) == behind + 1
    assert after == []
    assert all(len(part) <= 2 for part in during)
    for other in others:
        assert other == first, "all ranks are told the same"


def course(world: World, line: str, lengths: tuple[int, ...], drains: tuple[int, ...]) -> tuple[list[Any], list[Held]]:
    """Losses and norms of steps of samples of these lengths, drained after some of them."""
    engine = make(world, exact(), f"{line},dtype=float64")
    for number, length in enumerate(lengths):
        source = open_data(exact(f"data.seq_len={length}"))
        engine.step(source.batch(number, engine.mesh.coords["dp"], engine.layout.dp))
        if number in drains:
            engine.drain()
            engine.drain()  # once more has nothing to do
    engine.drain()
    return [(one.step, one.loss, one.grad_norm, one.lr) for one in engine.finished()], weights(engine)


@pytest.mark.parametrize("line", LINES)
def test_the_length_of_sequences_may_change_while_steps_are_under_way(line: str, pool: Pool) -> None:
    """And the stream may be drained at any time."""
    lengths, drains = (16, 7, 16, 16, 9, 9), (2,)
    found = pool.run(course, line, lengths, drains, ranks=Layout.parse(line).ranks)
    truth, expected = oracle(exact(), line), []
    for number, length in enumerate(lengths):
        expected.append(truth.step(open_data(exact(f"data.seq_len={length}")).batch(number)))
        if number in drains:
            truth.drain()
    for told, _ in found:
        assert [step for step, *_ in told] == list(range(1, 7))
        assert [loss for _, loss, _, _ in told] == pytest.approx([one.loss for one in expected], rel=EXACT)
        assert [norm for _, _, norm, _ in told] == pytest.approx([one.grad_norm for one in expected], rel=EXACT)
        rates = [learning_rate(exact())(number) * exact().optimizer.lr for number in range(6)]
        assert [lr for *_, lr in told] == pytest.approx(rates, rel=EXACT)
    whole = put_together(held for _, held in found)
    for name, weight in _logical(truth).items():
        torch.testing.assert_close(whole[name], weight, rtol=0, atol=EXACT)


def _logical(trainer: delayed.DelayedTrainer) -> dict[str, Tensor]:
    """The weights of the model, under the names that layouts know them by."""
    return {name: one.parameter.detach() for name, one in trainer._weights.items()}


# ---- versions


def versions(world: World, line: str) -> tuple[int, int]:
    """The most that were alive at an update, and that there ever was memory for."""
    config = exact()
    engine = make(world, config, f"{line},dtype=float64")
    assert engine._flow is not None
    held, alive = engine._flow._weights, [0]
    advance = held.advance

    def noted() -> None:
        advance()
        alive.append(held.alive)

    held.advance = noted  # type: ignore[method-assign]
    train(engine, config, 6)
    engine.drain()
    assert held.alive == 1
    return max(alive), len(held._versions)


@pytest.mark.parametrize("line", ["pp=4:pipedream,mb=2", "pp=3:pipedream,mb=4", "pp=2:pipedream,mb=1"])
def test_pipedream_has_as_many_versions_as_ranks_follow(line: str, pool: Pool) -> None:
    """p − r on rank r."""
    ranks = Layout.parse(line).ranks
    assert pool.run(versions, line, ranks=ranks) == [(ranks - rank, ranks - rank) for rank in range(ranks)]


@pytest.mark.parametrize("line", ["pp=4:pipedream-vertical,mb=2", "pp=2:pipedream-vertical,mb=1"])
def test_with_vertical_sync_every_rank_has_as_many_versions_as_there_are_ranks(line: str, pool: Pool) -> None:
    ranks = Layout.parse(line).ranks
    assert pool.run(versions, line, ranks=ranks) == [(ranks, ranks)] * ranks


@pytest.mark.parametrize("line", ["pp=4:2bw,mb=3", "pp=4:2bw,mb=6", "pp=2:2bw,mb=2", "pp=3:2bw,mb=4"])
def test_2bw_has_two_versions(line: str, pool: Pool) -> None:
    """The last rank, where a backward pass follows each forward pass at once, has one."""
    ranks = Layout.parse(line).ranks
    assert pool.run(versions, line, ranks=ranks) == [(2, 2)] * (ranks - 1) + [(1, 1)]


# ---- steps that update nothing


class Net(nn.Sequential):
    """Four layers, one or two a stage."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
        super().__init__(*layers, nn.Linear(3, 1))
        self.double()


POISONED, STEPS, LR = 3, 8, 0.2


def samples(number: int, micro_batches: int, poison: bool = True) -> dict[str, Tensor]:
    """Two a micro-batch; those of one step, of its second micro-batch if there is one, are not finite."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(2 * micro_batches, 3, generator=generator, dtype=torch.float64)
    if poison and number == POISONED:
        inputs[2 * min(1, micro_batches - 1)] = math.nan
    return {"inputs": inputs}


def poisoned(world: World, line: str, skips: int) -> tuple[list[Any], list[Held], int]:
    optimizer = Optimizer(name="sgd", lr=LR, momentum=0.0, weight_decay=0.0, clip=0.0, skips=skips)
    layout = Layout.parse(line)
    engine = Engine(Net(), layout, optimizer=optimizer, loss=lambda y, _: y.square().sum(), world=world)
    for number in range(STEPS):
        engine.step(samples(number, layout.mb))
    engine.drain()
    told = [(one.step, one.grad_norm, one.skipped, one.micro_batches) for one in engine.finished()]
    return told, weights(engine), engine.skipped


def skipping(stages: list[list[int]], schedule: str, micro_batches: int) -> dict[str, Tensor]:
    """The weights after all steps by the recurrence, in which an update whose gradients are not finite is none."""
    net = Net()
    versions = [{name: one.detach().clone() for name, one in net.named_parameters()}]
    last, whole = len(stages) - 1, schedule == "2bw"
    for number in range(STEPS):
        for batch in [samples(number, micro_batches)] if whole else _parts(samples(number, micro_batches)):
            t = len(versions) - 1
            old = {}
            for stage, units in enumerate(stages):
                age = {"2bw": 1, "pipedream": last - stage, "pipedream-vertical": last}[schedule]
                behind = versions[max(0, t - age)]
                old |= {name: value for name, value in behind.items() if int(name[0]) in units}
            parameters = {name: value.clone().requires_grad_() for name, value in old.items()}
            loss = torch.func.functional_call(net, parameters, (batch["inputs"],)).square().sum()
            gradients = dict(
                zip(
                    parameters, torch.autograd.grad(loss / len(batch["inputs"]), list(parameters.values())), strict=True
                )
            )
            new = dict(versions[t])
            for units in [list(range(4))] if whole else stages:
                mine = {name: one for name, one in gradients.items() if int(name[0]) in units}
                if all(one.isfinite().all() for one in mine.values()):
                    new |= {name: versions[t][name] - LR * one for name, one in mine.items()}
            versions.append(new)
    return versions[-1]


def _parts(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{"inputs": part} for part in batch["inputs"].split(2)]


@pytest.mark.parametrize(
    ("line", "stages"),
    [
        ("pp=2:2bw,mb=2", [[0, 1], [2, 3]]),
        ("pp=4:2bw,mb=3", [[0], [1], [2], [3]]),
        ("pp=2:pipedream,mb=2", [[0, 1], [2, 3]]),
        ("pp=4:pipedream,mb=1", [[0], [1], [2], [3]]),
        ("pp=4:pipedream-vertical,mb=2", [[0], [1], [2], [3]]),
    ],
)
def test_gradients_that_are_not_finite_skip_their_update_and_no_other(
    line: str, stages: list[list[int]], pool: Pool
) -> None:
    """Steps that were begun with the weights before go on, and so does the stream. Where a micro-batch is an update of
    its own, it is named."""
    layout = Layout.parse(line)
    found = pool.run(poisoned, line, 10, ranks=layout.ranks)
    for told, _, skipped in found:
        assert skipped == 1
        assert [step for step, *_ in told] == list(range(1, STEPS + 1))
        assert [bad for _, _, bad, _ in told] == [number == POISONED for number in range(STEPS)]
        assert [math.isfinite(norm) for _, norm, _, _ in told] == [number != POISONED for number in range(STEPS)]
        named = () if layout.schedule == "2bw" else (min(1, layout.mb - 1),)
        assert [which for *_, which in told] == [named if number == POISONED else () for number in range(STEPS)]
    whole = put_together(held for _, held, _ in found)
    for name, weight in skipping(stages, layout.schedule, layout.mb).items():
        torch.testing.assert_close(whole[name], weight, rtol=EXACT, atol=EXACT)


def endlessly_poisoned(world: World, line: str) -> tuple[str, tuple[int, tuple[int, ...]], list[int], bool]:
    """What ends it, of which step and micro-batches it says so, which steps have finished, and whether the weights are
    the first ones."""
    optimizer = Optimizer(name="sgd", lr=LR, skips=2)
    engine = Engine(Net(), Layout.parse(line), optimizer=optimizer, loss=lambda y, _: y.square().sum(), world=world)
    before = weights(engine)
    inputs = torch.full((2 * engine.layout.mb, 3), math.nan, dtype=torch.float64)
    try:
        for _ in range(12):
            engine.step({"inputs": inputs})
    except Diverged as error:
        finished = [one.step for one in engine.finished()]
        return str(error), (error.step, error.micro_batches), finished, equal(before, weights(engine))
    return "", (0, ()), [], False


@pytest.mark.parametrize("line", ["pp=2:2bw,mb=2", "pp=2:pipedream,mb=2", "pp=4:pipedream,mb=1"])
def test_too_many_in_a_row_end_the_run_on_all_ranks(line: str, pool: Pool) -> None:
    layout = Layout.parse(line)
    for told, which, finished, unchanged in pool.run(endlessly_poisoned, line, ranks=layout.ranks):
        assert told.startswith("step 3: the gradient norm is nan; nothing was updated (step 3 in a row)"), told
        assert which == (3, () if layout.schedule == "2bw" else tuple(range(layout.mb)))
        assert finished == [1, 2], "what came before is told, and nothing twice"
        assert unchanged


# ---- the scale of the loss


def overflowing(world: World, line: str, folder: Path) -> tuple[list[Any], float, Any]:
    """From a scale at which gradients overflow; and what an engine that goes on from a checkpoint is told."""
    config = read("optimizer.skips=0")
    engine = make(world, config, f"{line},dtype=fp16")
    engine._guard.scale = 2.0**22
    train(engine, config, 40)
    engine.save(folder)
    told = [(one.skipped, one.loss) for one in engine.finished()]
    other = make(world, config, f"{line},dtype=fp16")
    other.load(folder)
    assert other._guard.state() == engine._guard.state()
    assert (other.steps_done, other.skipped) == (40, engine.skipped)
    train(other, config, 3)
    other.drain()
    return told, engine._guard.scale, [one.skipped for one in other.finished()]


@pytest.mark.parametrize("line", ["pp=2:2bw,mb=2", "dp=2,pp=2:2bw,zero=1,mb=2", "pp=2:pipedream,mb=2"])
def test_a_scale_that_overflows_falls_once_for_all_steps_that_were_begun_with_it(
    line: str, pool: Pool, tmp_path: Path
) -> None:
    (first, *others) = pool.run(overflowing, line, tmp_path, ranks=Layout.parse(line).ranks)
    assert all(str(other) == str(first) for other in others)
    told, scale, after = first
    skipped = [bad for bad, _ in told]
    assert len(told) == 40
    assert 0 < sum(skipped) < 38
    assert skipped == sorted(skipped, reverse=True), "once it fits, it fits"
    halvings = 22 - math.log2(scale)
    assert 0 < halvings < sum(skipped) <= 4 * halvings, "of up to four steps under way"
    assert all(math.isfinite(loss) for _, loss in told)
    assert after == [False] * 3


def in_precision(world: World, line: str, dtype: str) -> list[tuple[float, float]]:
    config = read("optimizer.clip=0.1")
    engine = make(world, config, f"{line},dtype={dtype}")
    for number in range(6):
        if dtype == "fp16":
            engine._guard.scale = 2.0 ** (8 + number % 3)  # as it may change while steps are under way
        train(engine, config, 1)
    engine.drain()
    return [(one.loss, one.grad_norm) for one in engine.finished()]


@pytest.mark.parametrize("line", ["pp=2:2bw,mb=2", "pp=2:pipedream,mb=2"])
def test_a_step_is_unscaled_by_the_scale_that_it_was_begun_with(line: str, pool: Pool) -> None:
    half, (full, _) = pool.run(in_precision, line, "fp16", ranks=2), pool.run(in_precision, line, "float32", ranks=2)
    for found in half:
        for one, expected in zip(found, full, strict=True):
            assert one == pytest.approx(expected, rel=0.01)
