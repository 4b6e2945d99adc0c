"""The engine on a user's own modules and on Shoal's decoder: what every layout must leave as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine_ranks import Held, equal, put_together, weights
from torch import Tensor, nn

from shoal.build import DTYPES, SCHEDULES
from shoal.comm.world import World
from shoal.config import Config, Optimizer, load
from shoal.engine import Engine, StepResult
from shoal.errors import ConfigError, LayoutError
from shoal.layout import Layout
from shoal.layout.layout import BUILT
from shoal.mesh import Grid
from shoal.pipeline.stream import STREAMS
from shoal.train.pool import Pool
from shoal.train.setup import make_engine

RUN = Path(__file__).parents[1] / "runs" / "tiny6.toml"
OPTIMIZER = Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)
SAMPLES, STEPS, WIDTH = 12, 5, 10


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
        self.running = Running(7)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.running(self.frozen(self.first(x)) + self.shift)
        if (x[:, 0] > 0).any():
            hidden = torch.where(x[:, :1] > 0, hidden * self.gate, hidden)
        return self.last(hidden)


class Running(nn.Module):
    """tanh, with the running mean of its output and the number of its calls in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        if self.training:
            self.mean += 0.1 * (hidden.detach().mean(0) - self.mean)
            self.calls += 1
        return hidden


def chain(seed: int) -> nn.Sequential:
    """Eight layers: two with buffers, a frozen one, and one that runs twice."""
    torch.manual_seed(seed)
    frozen, twice = nn.Linear(6, 6), nn.Linear(6, 6)
    frozen.requires_grad_(False)
    layers = [nn.Linear(WIDTH, 6), Running(6), twice, frozen, nn.Linear(6, 6), Running(6), twice, nn.Linear(6, 1)]
    return nn.Sequential(*layers).double()


def bare(seed: int) -> nn.Sequential:
    """The same without buffers."""
    return nn.Sequential(*(nn.Tanh() if isinstance(layer, Running) else layer for layer in chain(seed)))


MAKERS: dict[str, Callable[[int], nn.Module]] = {"mlp": Mlp, "chain": chain, "bare": bare}


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(output[:, 0], batch["targets"], reduction="sum")


def samples(step: int) -> dict[str, Tensor]:
    """In the first half of the samples none uses the gate, and at step 2 none at all does."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    half = SAMPLES // 2
    x[:, 0] = x[:, 0].abs() * torch.tensor([-1.0] * half + [-1.0 if step == 2 else 1.0] * half)
    return {"inputs": x, "targets": x.sum(1)}


@dataclass(frozen=True)
class Course:
    """Five steps, an evaluation after them, and what this rank held before and after."""

    steps: list[StepResult]
    evaluated: tuple[float, float]
    before: list[Held]
    after: list[Held]


def train(world: World, name: str, line: str, folder: Path) -> Course:
    """A course from the seed of the first replica, each having its own; then a save, and a load into another engine,
    which must go on alike."""

    def engine(seed: int) -> Engine:
        return Engine(MAKERS[name](seed), Layout.parse(line), optimizer=OPTIMIZER, world=world, loss=loss)

    layout = Layout.parse(line)
    one = engine(seed=Grid(layout.axes).coords(world.rank)["dp"])
    share = SAMPLES // one.layout.dp
    here = one.mesh.coords["dp"] * share

    def part(number: int) -> dict[str, Tensor]:
        return {name: x[here : here + share] for name, x in samples(number).items()}

    before = weights(one)
    steps = [one.step(part(number)) for number in range(STEPS)]
    course = Course(steps, one.evaluate(part(STEPS)), before, weights(one))
    path = one.save(folder, {"made": "here"})
    other = engine(99)
    assert other.load(path) == {"made": "here"}
    assert equal(course.after, weights(other))
    assert one.step(part(7)) == other.step(part(7))
    return course


def train_plainly(model: nn.Module, layout: Layout) -> tuple[list[float], list[float]]:
    """The same five steps by plain PyTorch: losses, and gradient norms before clipping.

    A micro-batch is that of all replicas together, so that running means come out the same.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = {
            name: x.unflatten(0, (layout.dp, layout.mb, -1)).transpose(0, 1).flatten(1, 2)
            for name, x in samples(step).items()
        }
        total = torch.zeros(())
        for number in range(layout.mb):
            micro_batch = {name: x[number] for name, x in batch.items()}
            total = total + loss(model(micro_batch["inputs"]), micro_batch) / SAMPLES
        total.backward()
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        losses.append(total.item())
        norms.append(torch.cat([p.grad.flatten() for p in trained]).norm().item())
        for p in trained:
            p.grad *= min(1.0, OPTIMIZER.clip / norms[-1])
        optimizer.step()
    return losses, norms


CASES = [
    ("mlp", "dp=1"),
    ("mlp", "dp=2"),
    ("mlp", "dp=3,mb=2"),
    ("mlp", "dp=2,zero=1"),
    ("mlp", "dp=3,zero=2,mb=2"),
    ("mlp", "dp=4,zero=3"),
    ("mlp", "dp=4,zero=3/2"),
    ("chain", "dp=2,mb=2"),
    ("chain", "dp=3,zero=3,mb=2"),
    ("chain", "dp=3,zero=3{keep=step},mb=2"),
    ("chain", "dp=2,pp=2"),
    ("chain", "dp=2,pp=2:gpipe{layers=3/5},zero=1,mb=3"),
    ("chain", "dp=2,pp=2{layers=1/7},zero=2,mb=3"),
    ("chain", "dp=2,pp=2,zero=3,mb=2"),
    ("chain", "pp=3{layers=4/2/2},mb=4"),
    ("chain", "pp=4,mb=2"),
    ("bare", "recompute=full,mb=2"),
    ("bare", "dp=2,pp=2,zero=3,mb=2,recompute=full"),
]


@pytest.mark.parametrize(("name", "line"), CASES, ids=[f"{name} {line}" for name, line in CASES])
def test_a_users_own_module_trains_as_it_would_alone(name: str, line: str, pool: Pool, tmp_path: Path) -> None:
    layout = Layout.parse(line)
    courses = pool.run(train, name, line, tmp_path, ranks=layout.ranks)
    first, model = courses[0], MAKERS[name](0)
    start = put_together(course.before for course in courses)
    assert start.keys() == model.state_dict().keys() - aliases(model)
    assert all(torch.equal(x, model.state_dict()[name].double()) for name, x in start.items())
    losses, norms = train_plainly(model, layout)
    assert all((course.steps, course.evaluated) == (first.steps, first.evaluated) for course in courses)
    assert [step.loss for step in first.steps] == pytest.approx(losses, rel=1e-12)
    assert [step.grad_norm for step in first.steps] == pytest.approx(norms, rel=1e-11)
    for name, x in put_together(course.after for course in courses).items():
        expected = model.state_dict()[name].double()
        torch.testing.assert_close(x, expected, atol=1e-11, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        if "frozen" in name or name.startswith("3.") or name == "shift":
            assert torch.equal(x, start[name]), f"{name} stays, bit for bit"
    batch = samples(STEPS)
    summed = loss(model.eval()(batch["inputs"]), batch).item()
    assert first.evaluated == pytest.approx((summed, SAMPLES), rel=1e-11)


def aliases(model: nn.Module) -> set[str]:
    """The names of a state dict that are second names of a tensor."""
    known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return model.state_dict().keys() - known


def test_a_module_without_a_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a loss"):
        Engine(nn.Linear(2, 2), Layout())


def test_samples_that_micro_batches_do_not_divide_are_refused() -> None:
    engine = Engine(Mlp(0), Layout(mb=5), loss=loss)
    with pytest.raises(LayoutError, match=r"mb = 5: does not divide the 12 samples .* \[1, 2, 3, 4, 6, 12\]"):
        engine.step(samples(0))


def refuses(world: World, name: str, line: str) -> str:
    with pytest.raises(LayoutError) as caught:
        Engine(MAKERS[name](0), Layout.parse(line), loss=loss, world=world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("mlp", "tp=2", "layout.tp = 2: the module has no role table; give Engine an example=batch, or use tp=1"),
        (
            "chain",
            "tp=2:1d-sp",
            "layout.tp = 2: the module has no role table; give Engine an example=batch, or use tp=1",
        ),
        ("mlp", "pp=2", "layout.pp = 2: 2 stages are more than the model's 1 layers; give Engine an example=batch, or"),
        ("chain", "pp=2{layers=4/3}", "layout.pp layers = 4/3: the model has 8 blocks for 2 stages; use 2 numbers"),
        ("chain", "cp=2", "layout.cp = 2: the module has no role table that tells where attention is; use cp=1"),
        ("chain", "dp=2,ep=2", "layout.ep = 2: the model has no experts; use ep=1"),
        ("chain", "dp=2,etp=2", "layout.etp = 2: the model has no experts; use etp=1"),
    ],
)
def test_a_module_that_a_layout_does_not_fit_is_refused_on_every_rank(
    name: str, line: str, words: str, pool: Pool
) -> None:
    for told in pool.run(refuses, name, line, ranks=2):
        assert told.startswith(words)


def test_every_schedule_and_dtype_that_a_layout_may_name_is_there() -> None:
    assert set(BUILT["pp"]) == SCHEDULES.keys() | STREAMS.keys()
    assert set(BUILT["dtype"]) <= DTYPES.keys()


def first_weights(world: World, config: Config, line: str) -> list[Held]:
    return weights(make_engine(config, Layout.parse(line), world))


LAYOUTS = (
    "dp=2",
    "dp=3,zero=1",
    "dp=4,zero=3,mb=2",
    "tp=2",
    "tp=3:1d-sp",
    "pp=4,mb=2",
    "pp=2:gpipe{layers=5/1}",
    "dp=2,tp=2,pp=2,zero=3",
)


def test_the_weights_at_step_0_are_bit_identical_under_every_layout(eight: Pool) -> None:
    config = load(RUN, ["model.tied=true"])
    first = put_together(eight.run(first_weights, config, "dp=1", ranks=1))
    assert "blocks.0.attn.q.weight" in first
    for line in LAYOUTS:
        found = put_together(eight.run(first_weights, config, line, ranks=Layout.parse(line).ranks))
        assert found.keys() == first.keys()
        assert [name for name, x in first.items() if not torch.equal(found[name], x)] == [], line
