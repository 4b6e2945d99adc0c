"""What a user's module and batch may do to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import Held, equal, put_together, weights
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.engine import Engine, StepResult
from shoal.errors import ConfigError, Diverged, LayoutError
from shoal.layout import Layout
from shoal.train.pool import Pool

SGD = Optimizer(name="sgd", lr=1.0, weight_decay=0.0, clip=0)
REPLICAS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,sync=server"]


def summed(output: Tensor, batch: Any) -> Tensor:
    return output.sum()


def weighted(output: Tensor, batch: Any) -> Tensor:
    return (output[:, 0] * batch["weights"]).sum()


def one_weight() -> nn.Module:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    return module


@pytest.mark.parametrize("scale", [0.05, 1.0, 40.0])
def test_the_mean_is_over_the_weights_however_small(scale: float) -> None:
    engine = Engine(one_weight(), Layout(mb=2), optimizer=SGD, loss=weighted, weight=lambda b: b["weights"].sum())
    inputs = torch.tensor([[1.0], [2.0], [3.0], [6.0]], dtype=torch.float64)
    result = engine.step({"inputs": inputs, "weights": torch.full((4,), scale, dtype=torch.float64)})
    assert result.grad_norm == pytest.approx(3.0, rel=1e-12)
    assert result.weight == pytest.approx(4 * scale)


def test_a_step_in_which_nothing_counts_changes_nothing() -> None:
    module = one_weight()
    engine = Engine(module, Layout(), optimizer=SGD, loss=weighted, weight=lambda b: b["weights"].sum())
    batch = {"inputs": torch.ones(2, 1, dtype=torch.float64), "weights": torch.zeros(2, dtype=torch.float64)}
    result = engine.step(batch)
    assert (result.loss, result.grad_norm, result.weight) == (0.0, 0.0, 0.0)
    assert module.weight.item() == 0.0


def two_weights() -> nn.Sequential:
    module = nn.Sequential(one_weight(), one_weight())
    for layer in module:
        nn.init.ones_(layer.weight)
    return module


def poison(world: World, line: str, folder: Path) -> tuple[list[StepResult], list[Held], list[Held], str]:
    """Two steps, a poisoned one between them; then poisoned ones only. Only the last of the replicas is poisoned."""
    momentum = Optimizer(lr=0.1, weight_decay=0.0, clip=0, skips=2)
    engine = Engine(two_weights(), Layout.parse(line), optimizer=momentum, loss=summed, world=world)

    def step(value: float) -> StepResult:
        here = value if engine.mesh.coords["dp"] == engine.layout.dp - 1 else 1.0
        return engine.step({"inputs": torch.full((2, 1), here, dtype=torch.float64)})

    results = [step(value) for value in (1.0, float("inf"), 1.0)]
    after = weights(engine)
    path = engine.save(folder)
    other = Engine(two_weights(), Layout.parse(line), optimizer=momentum, loss=summed, world=world)
    other.load(path)
    assert (other.steps_done, other.skipped) == (engine.steps_done, engine.skipped) == (3, 1)
    for each in (engine, other):  # with the same number of updates behind them, they go on alike
        each.step({"inputs": torch.ones((2, 1), dtype=torch.float64)})
    assert equal(weights(engine), weights(other))
    before = weights(engine)
    results += [step(float("nan")) for _ in range(2)]
    with pytest.raises(Diverged) as caught:
        step(float("nan"))
    assert equal(before, weights(engine))
    return results, after, before, str(caught.value)


@pytest.mark.parametrize("line", [*REPLICAS, "pp=2"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(line: str, pool: Pool, tmp_path: Path) -> None:
    """The step counts, but not as an update; too many in a row end the run."""
    alone = Engine(two_weights(), Layout(), optimizer=Optimizer(lr=0.1, weight_decay=0.0, clip=0), loss=summed)
    for _ in range(2):
        alone.step({"inputs": torch.ones((2, 1), dtype=torch.float64)})
    for results, _, _, text in (told := pool.run(poison, line, tmp_path, ranks=2)):
        assert [one.skipped for one in results] == [False, True, False, True, True]
        assert [one.step for one in results] == [1, 2, 3, 5, 6]
        assert [one.lr for one in results] == [0.1, 0.0, 0.1, 0.0, 0.0]
        assert "step 7: the gradient norm is nan; nothing was updated (step 3 in a row)" in text
    found = put_together(held for _, held, _, _ in told)
    expected = put_together([weights(alone)])
    assert {name: x.item() for name, x in found.items()} == {name: x.item() for name, x in expected.items()}


class Scaled(nn.Module):
    """A buffer that is in no checkpoint and yet decides what is computed; a frozen batch norm; a complex buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("features", torch.randn(1, 3), persistent=False)
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 1j]))
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x @ self.features))


def states(world: World, line: str) -> dict[str, Any]:
    module = Scaled(seed=world.rank)
    module.norm.eval()
    engine = Engine(module, Layout.parse(line), optimizer=SGD, loss=summed, world=world)
    batch = {"inputs": torch.randn(4, 1)}
    before = engine.evaluate(batch)
    engine.step(batch)
    modes = {name: one.training for name, one in module.named_modules()}
    return {
        "features": module.features.tolist(),
        "phase": module.phase.tolist(),
        "mean": module.norm.running_mean.abs().max().item(),
        "modes": modes,
        "evaluated": before,
    }


@pytest.mark.parametrize("line", REPLICAS)
def test_buffers_start_equal_and_a_users_modes_stay(line: str, pool: Pool) -> None:
    first, second = pool.run(states, line, ranks=2)
    assert first == second
    assert first["phase"] == [1 + 2j, 3 - 1j]
    assert first["mean"] == 0.0, "a batch norm that the user froze does not move"
    assert first["modes"] == {"": True, "norm": False, "out": True}


class Shouting(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 100


def test_a_sequential_with_a_forward_of_its_own_is_one_layer() -> None:
    module = Shouting(one_weight())
    nn.init.ones_(module[0].weight)
    engine = Engine(module, Layout(), optimizer=SGD, loss=summed)
    assert engine.evaluate({"inputs": torch.ones(1, 1, dtype=torch.float64)}) == (100.0, 1.0)


def test_a_layer_that_occurs_twice_runs_twice() -> None:
    layer = one_weight()
    nn.init.constant_(layer.weight, 3.0)
    engine = Engine(nn.Sequential(layer, layer), Layout(), optimizer=SGD, loss=summed)
    result = engine.step({"inputs": torch.ones(1, 1, dtype=torch.float64)})
    assert (result.loss, result.grad_norm) == (9.0, 6.0)


class Sometimes(nn.Module):
    """Uses its weight for positive inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if (x > 0).any() else x


def half_of_the_ranks(world: World, line: str) -> tuple[float, float, float]:
    module = Sometimes()
    engine = Engine(module, Layout.parse(line), optimizer=SGD, loss=summed, world=world)
    result = engine.step({"inputs": torch.full((2, 1), 3.0 if world.rank else -3.0, dtype=torch.float64)})
    return result.loss, result.grad_norm, result.weight


@pytest.mark.parametrize("line", REPLICAS)
def test_a_rank_whose_loss_depends_on_no_parameter_takes_part(line: str, pool: Pool) -> None:
    assert pool.run(half_of_the_ranks, line, ranks=2) == [(-1.5, 1.5, 4.0)] * 2


def first_stage_frozen(world: World, line: str) -> tuple[StepResult, list[Held]]:
    module = two_weights()
    module[0].requires_grad_(False)
    engine = Engine(module, Layout.parse(line), optimizer=SGD, loss=summed, world=world)
    return engine.step({"inputs": torch.full((2, 1), 3.0, dtype=torch.float64)}), weights(engine)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_without_anything_to_train_takes_part(zero: int, pool: Pool) -> None:
    (first, _), *others = told = pool.run(first_stage_frozen, f"pp=2,zero={zero},mb=2", ranks=2)
    assert (first.loss, first.grad_norm) == (3.0, 3.0)
    assert all(result == first for result, _ in others)
    found = put_together(held for _, held in told)
    assert {name: x.item() for name, x in found.items()} == {"0.weight": 1.0, "1.weight": -2.0}


def failing(output: Tensor, batch: Any) -> Tensor:
    if (batch["inputs"] == 13).any():
        raise ValueError("unlucky")
    return output.sum()


def fail_half_way(world: World, line: str) -> list[StepResult]:
    """A good step after one that failed on all ranks in its second micro-batch, and one after nothing."""
    layout = Layout.parse(line)
    engine, clean = (
        Engine(two_weights(), layout, optimizer=SGD, loss=failing, world=world) for _ in range(2)
    )  # fmt: skip
    with pytest.raises(ValueError, match="unlucky"):
        engine.step({"inputs": torch.tensor([[5.0], [13.0]], dtype=torch.float64)})
    good = {"inputs": torch.tensor([[1.0], [2.0]], dtype=torch.float64)}
    return [engine.step(good), clean.step(good)]


@pytest.mark.parametrize("line", REPLICAS)
def test_a_step_that_failed_half_way_leaves_nothing_in_the_next(line: str, pool: Pool) -> None:
    for after, clean in pool.run(fail_half_way, f"{line},mb=2", ranks=2):
        assert after == clean


def test_gradients_of_the_users_own_backward_do_not_enter_a_step() -> None:
    module = one_weight()
    engine = Engine(module, Layout(), optimizer=SGD, loss=summed)
    module(torch.full((1, 1), 50.0, dtype=torch.float64)).sum().backward()
    with torch.no_grad():
        assert engine.step({"inputs": torch.ones(1, 1, dtype=torch.float64)}).grad_norm == 1.0


def test_a_parameter_frozen_after_the_engine_was_made_is_refused() -> None:
    module = one_weight()
    engine = Engine(module, Layout(), optimizer=SGD, loss=summed)
    module.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="weight was frozen after the engine was made"):
        engine.step({"inputs": torch.ones(1, 1, dtype=torch.float64)})


def test_tensors_of_a_batch_must_agree_on_its_samples() -> None:
    engine = Engine(one_weight(), Layout(), optimizer=SGD, loss=summed)
    with pytest.raises(ConfigError, match=r"'inputs': 8, 'labels': 16"):
        engine.step({"inputs": torch.ones(8, 1, dtype=torch.float64), "labels": torch.ones(16)})


def test_loading_weights_alone_starts_afresh(tmp_path: Path) -> None:
    momentum = Optimizer(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, clip=0)
    batch = {"inputs": torch.ones(1, 1, dtype=torch.float64)}
    used, fresh = (Engine(one_weight(), Layout(), optimizer=momentum, loss=summed) for _ in range(2))
    path = used.save(tmp_path)
    for _ in range(3):
        used.step(batch)
    used.load(path, states=False)
    assert used.step(batch) == fresh.step(batch)
    assert used.task.module.weight.item() == fresh.task.module.weight.item()


def keeping(world: World, layer: str, line: str) -> tuple[StepResult, list[Held]]:
    """A step of a chain in the middle of which is a layer with something of its own."""
    torch.manual_seed(0)
    middle = nn.Dropout(0.5) if layer == "dropout" else nn.BatchNorm1d(3)
    module = nn.Sequential(nn.Linear(1, 3), middle, nn.Linear(3, 3), nn.Linear(3, 1)).double()
    engine = Engine(module, Layout.parse(line), optimizer=SGD, loss=summed, world=world)
    return engine.step({"inputs": torch.arange(6.0, dtype=torch.float64)[:, None]}), weights(engine)


@pytest.mark.parametrize("layer", ["dropout", "batch norm"])
def test_recomputing_a_users_layer_changes_nothing(layer: str, pool: Pool) -> None:
    (kept,), (recomputed,) = (pool.run(keeping, layer, f"recompute={how}", ranks=1) for how in ("none", "full"))
    assert kept[0] == recomputed[0]
    assert equal(kept[1], recomputed[1])


class Counts(nn.Module):
    """Counts its calls in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += int(self.training)
        return x * 1


def shared_buffer(world: World) -> list[Held]:
    counts = Counts()
    module = nn.Sequential(one_weight(), counts, one_weight(), counts, one_weight())
    engine = Engine(module, Layout.parse("pp=2{layers=3/2}"), optimizer=SGD, loss=summed, world=world)
    engine.step({"inputs": torch.ones(1, 1, dtype=torch.float64)})
    return weights(engine)


def test_a_buffer_of_a_layer_that_two_stages_would_share_is_refused(pool: Pool) -> None:
    with pytest.raises(LayoutError, match="stages 0 and 1 would share a module with buffers"):
        pool.run(shared_buffer, ranks=2)


def own_seeds(world: World, line: str) -> list[Held]:
    torch.manual_seed(world.rank)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)).double()
    return weights(Engine(module, Layout.parse(line), optimizer=SGD, loss=summed, world=world))


@pytest.mark.parametrize("line", [*REPLICAS, "pp=2"])
def test_parameters_start_as_the_first_rank_has_them(line: str, pool: Pool) -> None:
    alone, several = (put_together(pool.run(own_seeds, one, ranks=n)) for one, n in (("dp=1", 1), (line, 2)))
    assert {name: x.tolist() for name, x in several.items()} == {name: x.tolist() for name, x in alone.items()}


class Borrows(nn.Module):
    """Uses the weight of a later layer, of which no list of its parameters tells."""

    def __init__(self, later: nn.Module) -> None:
        super().__init__()
        self.later = [later]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.later[0].weight


@pytest.mark.parametrize("mb", [1, 2])
def test_a_gradient_that_comes_after_its_unit_was_done_is_noticed(mb: int) -> None:
    """Its bucket may be on its way already: it must not be added in silence."""
    later = one_weight()
    engine = Engine(nn.Sequential(one_weight(), Borrows(later), later), Layout(mb=mb), optimizer=SGD, loss=summed)
    with pytest.raises(ConfigError, match="came after its unit was done"):
        engine.step({"inputs": torch.ones(2, 1, dtype=torch.float64)})
