"""Users' own modules, traced and divided, against one process that calls them, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_ranks import Held, put_together, weights
from own_modules import MODULES, batches, build, loss, weight

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.train.pool import Pool

STEPS, SAMPLES, CLIP = 4, 6, 0.3
OPTIMIZER = Optimizer(lr=0.01, clip=CLIP, weight_decay=0.1)


def trained(world: World, name: str, line: str) -> tuple[list[tuple[float, float]], list[Held]]:
    """The loss and gradient norm of each step, and the weights at the end."""
    module, every = build(name), batches(name, STEPS, SAMPLES)
    layout = Layout.parse(line)
    engine = Engine(module, layout, optimizer=OPTIMIZER, world=world, loss=loss, weight=weight, example=every[0])
    part = SAMPLES // engine.layout.dp
    start = engine.mesh.coords["dp"] * part
    found = []
    for batch in every:
        result = engine.step({key: one[start : start + part] for key, one in batch.items()})
        assert result is not None
        found.append((result.loss, result.grad_norm))
    return found, weights(engine)


def compare(pool: Pool, name: str, line: str) -> None:
    module = build(name)
    losses: list[float] = []
    norms: list[float] = []
    matrices = [one for one in module.parameters() if one.ndim > 1]
    vectors = [one for one in module.parameters() if one.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}
    ]  # fmt: skip
    adamw = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    for batch in batches(name, STEPS, SAMPLES):
        value = loss(module(batch["inputs"]), batch) / weight(batch)
        value.backward()
        norms.append(
            torch.nn.utils.get_total_norm([one.grad for one in module.parameters() if one.grad is not None]).item()
        )
        for one in module.parameters():
            assert one.grad is not None
            one.grad *= CLIP / norms[-1]
        losses.append(value.item())
        adamw.step()
        adamw.zero_grad()
    assert min(norms) > CLIP, "clipping is to be at work"
    ranks = pool.run(trained, name, line, ranks=ranks_of(line))
    for results, _ in ranks:
        for (ours, norm), theirs, other in zip(results, losses, norms, strict=True):
            assert abs(ours - theirs) < 1e-9 * abs(theirs)
            assert abs(norm - other) < 1e-9 * other
    full = put_together([held for _, held in ranks])
    for key, tensor in module.named_parameters():
        assert (full[key] - tensor).norm() < 1e-9 * tensor.norm(), key


def ranks_of(line: str) -> int:
    return Layout.parse(line).ranks


SLOW = [pytest.param(name, marks=pytest.mark.parity) for name in MODULES if name != "mlp"]


@pytest.mark.parametrize("name", ["mlp", *SLOW])
def test_tensor_parallel_as_one_process(pool: Pool, name: str) -> None:
    compare(pool, name, "tp=2,dtype=float64")


@pytest.mark.parametrize("name", ["mlp", *SLOW])
def test_pipeline_as_one_process(pool: Pool, name: str) -> None:
    compare(pool, name, "pp=2,mb=3,dtype=float64")


@pytest.mark.parity
@pytest.mark.parametrize("line", ["dp=2,zero=1,tp=2", "tp=2,pp=2,mb=3", "dp=2,zero=3,tp=2,recompute=full"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_together_as_one_process(pool: Pool, name: str, line: str) -> None:
    compare(pool, name, f"{line},dtype=float64")
