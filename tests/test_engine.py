"""The engine on Shoal's decoder and on a user's own module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config import Config, Optimizer, load
from shoal.engine import Engine
from shoal.errors import ConfigError, LayoutError
from shoal.layout import Layout
from shoal.meter import Meter
from shoal.placement import assemble
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

RUN = Path(__file__).parents[1] / "runs" / "tiny6.toml"
OPTIMIZER = Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)
WIDTH = 10


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


class Mlp(nn.Module):
    """Buffers, a frozen parameter, and a gate that only samples with a positive first feature use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.gate = nn.Parameter(torch.randn(7))
        self.last = nn.Linear(7, 1)
        self.register_buffer("shift", torch.randn(7))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.first(x)) + self.shift)
        if self.training:
            self.mean += 0.1 * (hidden.detach().mean(0) - self.mean)
            self.calls += 1
        if (x[:, 0] > 0).any():
            hidden = torch.where(x[:, :1] > 0, hidden * self.gate, hidden)
        return self.last(hidden)


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(output[:, 0], batch["targets"], reduction="sum")


def samples(step: int) -> dict[str, Tensor]:
    """Twelve samples; in the first half none uses the gate, and at step 2 none at all does."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, WIDTH, dtype=torch.float64, generator=generator)
    x[:, 0] = x[:, 0].abs() * torch.tensor([-1.0] * 6 + [-1.0 if step == 2 else 1.0] * 6)
    return {"inputs": x, "targets": x.sum(1)}


def run_mlp(world: World, layout: str, seeds: list[int], folder: Path) -> dict[str, Any]:
    """Five steps; each rank would start from its own seed if the engine did not start all from the first."""
    engine = Engine(
        Mlp(seeds[world.rank]), Layout.parse(layout), optimizer=OPTIMIZER, world=world, loss=loss
    )  # fmt: skip
    share = 12 // engine.layout.dp
    here = engine.mesh.coords["dp"] * share
    losses = []
    for step in range(5):
        batch = {name: x[here : here + share] for name, x in samples(step).items()}
        losses.append(engine.step(batch).loss)
    path = engine.save(folder, {"made": "here"})
    restored = Engine(Mlp(99), engine.layout, optimizer=OPTIMIZER, world=world, loss=loss)
    assert restored.load(path) == {"made": "here"}
    again, state = engine.task.module.state_dict(), restored.task.module.state_dict()
    assert all(torch.equal(again[name], state[name]) for name in again)
    trained = {name: x.tolist() for name, x in state.items()}
    following = {name: x[here : here + share] for name, x in samples(7).items()}
    assert engine.step(following) == restored.step(following)
    return {"losses": losses, "state": trained}


def plain_mlp() -> tuple[list[float], Mlp]:
    model = Mlp(0)
    matrices = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.ndim <= 1 and p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    losses = []
    for step in range(5):
        batch = samples(step)
        total = loss(model(batch["inputs"]), batch) / 12
        for p in [*matrices, *vectors]:
            p.grad = torch.zeros_like(p)
        total.backward()
        norm = sum((p.grad.square().sum() for p in [*matrices, *vectors]), torch.zeros(())).sqrt()
        for p in [*matrices, *vectors]:
            p.grad.mul_(min(1.0, 0.5 / norm.item()))
        optimizer.step()
        losses.append(total.item())
    return losses, model


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=3,mb=2", "dp=4"])
def test_a_users_own_module_trains_as_it_would_alone(layout: str, workers: Pool, tmp_path: Path) -> None:
    ranks = Layout.parse(layout).ranks
    found = workers.run(run_mlp, layout, [0, 5, 6, 7], tmp_path, ranks=ranks)
    losses, model = plain_mlp()
    assert all(one == found[0] for one in found), "the replicas agree in every bit, buffers included"
    assert found[0]["losses"] == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            torch.tensor(found[0]["state"][name], dtype=torch.float64), parameter, atol=1e-11, rtol=0
        )
    untouched = Mlp(0)
    assert found[0]["state"]["shift"] == untouched.shift.tolist(), "a buffer that nothing writes stays, bit for bit"
    assert found[0]["state"]["frozen.weight"] == untouched.frozen.weight.tolist()
    assert found[0]["state"]["calls"] == 5 * Layout.parse(layout).mb


def test_a_module_without_a_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a loss"):
        Engine(nn.Linear(2, 2), Layout())


def test_samples_that_micro_batches_do_not_divide_are_refused() -> None:
    engine = Engine(Mlp(0), Layout(mb=5), loss=loss)
    with pytest.raises(LayoutError, match=r"mb = 5: does not divide the 12 samples .* \[1, 2, 3, 4, 6, 12\]"):
        engine.step(samples(0))


def count_words(world: World, layout: str) -> dict[str, float]:
    config = load(RUN)
    engine = make_engine(config, Layout.parse(f"{layout},dtype=float64"), world)
    world.ledger.clear()
    engine.step(open_data(config).batch(0, engine.mesh.coords["dp"], engine.layout.dp))
    parameters = sum(p.numel() for p in engine.task.module.parameters())
    return {**world.ledger.table(), "parameters": parameters}


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,mb=4", "dp=3,mb=2", "dp=4"])
def test_data_parallelism_moves_the_ring_all_reduce_whatever_the_accumulation(layout: str, workers: Pool) -> None:
    n = Layout.parse(layout).ranks
    for words in workers.run(count_words, layout, ranks=n):
        assert words.pop("dp/gradients") == pytest.approx(2 * (n - 1) / n * words.pop("parameters"), rel=1e-15)
        scalars = 2 * (n - 1) / n
        assert words == pytest.approx({"dp/weight": scalars, "dp/loss": scalars}), "and nothing else but two scalars"


def first_weights(world: World, config: Config, layout: str) -> dict[str, Tensor]:
    engine = make_engine(config, Layout.parse(layout), world)
    held: dict[str, Any] = {}
    for one in engine.fragments():
        if one.kind == "weight":
            held.setdefault(one.piece.name, (one.piece.shape, []))[1].append((one.piece.box, one.tensor))
    return {name: assemble(shape, boxes).clone() for name, (shape, boxes) in held.items()}


def test_the_weights_at_step_0_are_bit_identical_under_every_layout(workers: Pool) -> None:
    config = load(RUN)
    layouts = ("dp=1", "dp=2", "dp=3", "dp=4,mb=2")
    (first,), *others = (workers.run(first_weights, config, lay, ranks=Layout.parse(lay).ranks) for lay in layouts)
    assert "blocks.0.attn.q.weight" in first
    assert all(x.isfinite().all() for x in first.values())
    for ranks in others:
        for weights in ranks:
            assert weights.keys() == first.keys()
            assert all(torch.equal(weights[name], x) for name, x in first.items())


def test_a_layout_that_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="not built yet"):
        Engine(Mlp(0), Layout(recompute="full"), loss=loss)


def test_model_states_take_16_bytes_a_parameter_by_the_meter() -> None:
    """float32 weights, main gradients and AdamW's two moments: what the page on data parallelism says."""
    config = load(RUN, ["layout.dtype=float32"])
    with Meter() as meter:
        engine = make_engine(config, config.plan(), World())
        for bucket in engine.buckets:
            meter.label("weights", [bucket.params])
            meter.label("gradients", [bucket.grads])
            meter.label("moments", bucket.states.values())
        with meter.phase("forward"):
            engine.step(open_data(config).batch(0))
        count = sum(p.numel() for p in engine.task.module.parameters())
        assert [meter.live(kind) for kind in ("weights", "gradients", "moments")] == [4 * count, 4 * count, 8 * count]
        assert meter.live() - 16 * count < 4096, "nothing else of size outlives a step"
