"""Half precision: float32 masters and gradients, what they take, what they save, and the scale of the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_ranks import Held, equal, put_together, weights
from precision_ranks import make, read, train
from torch import Tensor

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.engine import Engine, StepResult
from shoal.errors import ConfigError, LayoutError
from shoal.layout import Layout
from shoal.meter import Meter
from shoal.train.pool import Pool
from shoal.train.setup import make_model
from shoal.train.verify import verify

ADAMW = Optimizer(lr=1e-3)
STEPS = 6


# ---- what is kept


def bytes_held(world: World, line: str) -> tuple[dict[str, int], int]:
    """Of each category while the gradients are there, and how many parameters the rank's part of the model has."""
    config = read()
    engine = make(world, config, line)
    with Meter() as meter:
        for flat in engine._sync.flats:
            meter.label("parameters", [flat.params, flat.own_params])
            meter.label("masters", [flat.masters])
            meter.label("moments", flat.states.values())
        seen: list[dict[str, int]] = []

        def reduced() -> None:
            buffers = [tensor for flat in engine._sync.flats for tensor in (flat.grads, flat.own_grads)]
            meter.label("gradients", [*buffers, *(one.tensor for one in engine.gradients())])
            seen.append(meter.snapshot())

        engine.on_gradients = reduced
        with meter.phase("step"):
            train(engine, config, 1)
    return seen[0], sum(p.numel() for p in engine.task.module.parameters())


@pytest.mark.parametrize(
    ("line", "parameters", "gradients", "masters", "moments"),
    [
        ("dtype=bf16", 2, 4, 4, 8),
        ("dtype=bf16{grads=bf16}", 2, 2, 4, 8),
        ("dtype=fp16", 2, 4, 4, 8),
        ("dp=2,zero=1,dtype=bf16", 2, 4, 2, 4),
        ("dp=2,zero=2,dtype=bf16", 2, 2, 2, 4),
        ("dp=2,zero=3,dtype=bf16", 1, 2, 2, 4),
        ("dp=2,zero=3,dtype=bf16{grads=bf16}", 1, 1, 2, 4),
        ("tp=2,dtype=bf16{grads=bf16}", 2, 2, 4, 8),
    ],
)
def test_bytes_per_parameter(
    line: str, parameters: int, gradients: int, masters: int, moments: int, pool: Pool
) -> None:
    """18 with float32 gradients, 16 with half ones (Rajbhandari et al. 2020), and what ZeRO leaves of them."""
    each = {"parameters": parameters, "gradients": gradients, "masters": masters, "moments": moments}
    for held, psi in pool.run(bytes_held, line, ranks=Layout.parse(line).ranks):
        for kind, size in each.items():
            assert held[kind] == pytest.approx(size * psi, rel=0.001), kind


# ---- what is computed


def losses_and_weights(world: World, line: str) -> tuple[list[StepResult], list[Held]]:
    config = read()
    engine = make(world, config, line)
    return train(engine, config, STEPS), weights(engine)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_stage_of_zero_computes_the_same(dtype: str, pool: Pool) -> None:
    """But for the norm's rounding, which the clipping carries to the masters."""
    found = {}
    for line in ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,sync=server", "dp=2,sync=server/2"):
        ranks = pool.run(losses_and_weights, f"{line},dtype={dtype}", ranks=2)
        found[line] = [one.loss for one in ranks[0][0]], put_together(held for _, held in ranks)
    (losses, full), *others = found.values()
    for other, weights_of in others:
        assert other == pytest.approx(losses, rel=1e-5)
        for name, tensor in weights_of.items():
            torch.testing.assert_close(tensor, full[name], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "bf16{grads=bf16}"])
@pytest.mark.parametrize(
    "line",
    [
        "dp=1,mb=2",
        "dp=2,zero=3",
        "dp=3,sync=server/2",
        "tp=2:1d-sp",
        "pp=2:1f1b,mb=4",
        "dp=2,tp=2,zero=1,mb=2",
    ],
)
def test_layouts_stay_near_one_process_in_float32(line: str, dtype: str, pool: Pool) -> None:
    """As near as rounding lets them: the loss to half a per cent, the weights to a tenth of what training moved."""
    ((expected, truth),) = pool.run(losses_and_weights, "dtype=float32", ranks=1)
    ((_, start),) = pool.run(untrained, ranks=1)
    ranks = pool.run(losses_and_weights, f"{line},dtype={dtype}", ranks=Layout.parse(line).ranks)
    for found, _ in ranks:
        assert not any(one.skipped for one in found)
        assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=5e-3)
        assert [one.grad_norm for one in found] == pytest.approx([one.grad_norm for one in expected], rel=0.05)
    full, true = put_together(held for _, held in ranks), put_together([truth])
    before = put_together([start])
    moved = sum((true[name] - before[name]).square().sum() for name in true)
    off = sum((true[name] - full[name]).square().sum() for name in true)
    assert off < 0.15**2 * moved


def untrained(world: World) -> tuple[None, list[Held]]:
    return None, weights(make(world, read(), "dtype=float32"))


def test_masters_start_from_what_was_drawn_in_float32() -> None:
    config = read()
    exact, half = (weights(make(World(), config, f"dtype={dtype}")) for dtype in ("float32", "bf16"))
    assert equal(exact, half)


def test_masters_keep_updates_that_half_precision_would_round_away() -> None:
    """The weights of norms are 1, and an update of 1e-3 is below half of bf16's step there."""
    config = read("optimizer.lr=1e-3", "schedule.kind=constant", "schedule.warmup=0")
    engine = make(World(), config, "dtype=bf16")
    train(engine, config, 12)
    norms = [one.values for one in weights(engine) if one.name.endswith("norm.weight")]
    assert all(abs(values - 1).max() > 4e-3 for values in norms)
    for flat in engine._sync.flats:
        assert torch.equal(flat.params, flat.masters.to(torch.bfloat16))


# ---- what is saved


def half_way(world: World, line: str, folder: Path) -> list[Held]:
    config = read()
    engine = make(world, config, line)
    train(engine, config, 3)
    engine.save(folder)
    train(engine, config, 3)
    return weights(engine)


def resumed(world: World, line: str, folder: Path) -> tuple[list[Held], list[Held]]:
    config = read()
    engine = make(world, config, line)
    engine.load(folder / "step-00000003" if not (folder / "latest").exists() else folder)
    loaded = weights(engine)
    train(engine, config, 3)
    return loaded, weights(engine)


@pytest.mark.parametrize(
    "line",
    [
        "dp=2,dtype=bf16",
        "dp=2,zero=1,dtype=bf16",
        "dp=2,zero=3,dtype=fp16",
        "dp=2,sync=server,dtype=fp16",
        "tp=2,dtype=bf16",
    ],
)
def test_a_checkpoint_has_the_masters_and_goes_on_to_the_last_bit(line: str, pool: Pool, tmp_path: Path) -> None:
    expected = put_together(pool.run(half_way, line, tmp_path, ranks=2))
    again = pool.run(resumed, line, tmp_path, ranks=2)
    found = put_together(after for _, after in again)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    # Another precision loads the same values.
    ((loaded, _),) = pool.run(resumed, "dtype=float32", tmp_path, ranks=1)
    before = put_together(held for held, _ in again)
    assert all(torch.equal(before[name], tensor) for name, tensor in put_together([loaded]).items())


# ---- without masters

STOCHASTIC = ("optimizer.rounding=stochastic", "optimizer.lr=1e-3", "schedule.kind=constant", "schedule.warmup=0")


def without_masters(world: World, line: str) -> tuple[list[Held], int, int, list[float]]:
    """Weights after some steps, from a checkpoint half-way; bytes of moments; how many parameters; losses."""
    config = read(*STOCHASTIC)
    engine = make(world, config, line)
    moments = sum(state.nbytes for flat in engine._sync.flats for state in flat.states.values())
    assert all(flat.masters.data_ptr() == flat.own_params.data_ptr() for flat in engine._sync.flats)
    losses = [one.loss for one in train(engine, config, STEPS)]
    return weights(engine), moments, sum(p.numel() for p in engine.task.module.parameters()), losses


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,mb=4"])
def test_without_masters_copies_stay_equal_and_the_loss_falls_alike(line: str, pool: Pool) -> None:
    """``put_together`` compares the copies, of norms under tensor parallelism too."""
    config = read(*STOCHASTIC)
    exact = [
        one.loss for one in train(make(World(), config.model_copy(update={"optimizer": ADAMW}), "dp=1"), config, STEPS)
    ]
    ranks = pool.run(without_masters, f"{line},dtype=bf16", ranks=2)
    put_together(held for held, *_ in ranks)
    for _, moments, psi, losses in ranks:
        assert moments == pytest.approx(8 * psi / (2 if "zero" in line else 1), rel=0.001)
        assert losses == pytest.approx(exact, rel=5e-3)


def test_without_masters_small_updates_are_not_lost(tmp_path: Path) -> None:
    """The weights of norms are 1, and an update of 1e-3 is below half of bf16's step there: some move, by a step."""
    config = read(*STOCHASTIC)
    engine, other = (make(World(), config, "dtype=bf16") for _ in range(2))
    exact = make(World(), config.model_copy(update={"optimizer": ADAMW}), "dtype=float32")
    train(engine, config, 6)
    other.load(engine.save(tmp_path))
    for one in (engine, other, exact):
        train(one, config, 12 - one.steps_done)
    assert equal(weights(engine), weights(other))

    def moved(one: Engine) -> float:
        norms = [held.values for held in weights(one) if held.name.endswith("norm.weight")]
        return float(sum((values - 1).sum() for values in norms) / sum(values.size for values in norms))

    assert abs(moved(exact)) > 1e-3
    assert moved(engine) == pytest.approx(moved(exact), rel=0.25)


@pytest.mark.parametrize(
    ("dtype", "name", "problem"),
    [
        ("float32", "adamw", "is for weights in bf16; use dtype=bf16 in the layout, or nearest"),
        ("fp16", "adamw", "is for weights in bf16"),
        ("bf16", "muon", "Muon works on float32 copies; use nearest"),
    ],
)
def test_rounding_that_cannot_be_is_refused(dtype: str, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.rounding = stochastic: {problem}"):
        make(World(), read("optimizer.rounding=stochastic", f"optimizer.name={name}"), f"dtype={dtype}")


# ---- what is refused


def test_a_parameter_that_no_optimizer_could_train_is_refused() -> None:
    module = torch.nn.Linear(2, 1).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"weight is torch.float8_e4m3fn and trains; keep it in one of float64,"):
        Engine(module, Layout(), loss=lambda output, _: output.sum())


def test_verify_refuses_a_precision_in_which_nothing_would_be_proved(pool: Pool) -> None:
    with pytest.raises(LayoutError, match=r"layout.dtype = bf16: rounding would hide .* use dtype=float64"):
        verify(read(), Layout.parse("dp=2,dtype=bf16"), pool)


def test_the_gradients_of_a_module_in_half_precision_add_up_in_float32() -> None:
    """A module of the user's own: 256 micro-batches of 1, and then of 1/256, which bf16 would lose."""
    module = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.ones_(module.weight)

    def loss(output: Tensor, batch: object) -> Tensor:
        return output.float().sum()

    engine = Engine(module, Layout(mb=512), loss=loss)
    seen: list[float] = []
    engine.on_gradients = lambda: seen.append(float(engine.gradients()[0].tensor))
    inputs = torch.cat([torch.ones(256, 1), torch.full((256, 1), 1 / 256)]).bfloat16()
    engine.step({"inputs": inputs})
    assert seen == [pytest.approx((256 + 1) / 512)]


def test_a_model_is_built_in_the_precision_of_its_layout() -> None:
    config = read()
    dtypes = {p.dtype for p in make_model(config, Layout.parse("dtype=bf16")).parameters()}
    assert dtypes == {torch.bfloat16}
