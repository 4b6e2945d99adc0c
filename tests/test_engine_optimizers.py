"""What an engine makes of the optimizer's settings: which states there are, in which precision, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.comm.world import World
from shoal.config import Config, Optimizer, load
from shoal.engine import Engine
from shoal.errors import ConfigError
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.setup import fit, make_engine, open_data

TINY6 = Path(__file__).parents[1] / "runs" / "tiny6.toml"
HIDDEN = 2 * (4 * 48 * 48 + 3 * 48 * 50)
REST = 2 * 259 * 48 + 5 * 48


def read(*settings: str) -> Config:
    return load(TINY6, ["model.layers=2", "model.dropout=0", "data.seq_len=16", "optimizer.lr=3e-3", *settings])


def course(world: World, config: Config, line: str) -> tuple[list[float], dict[str, int], set[str]]:
    """Losses, and how many elements of each state this rank has, in which dtypes."""
    layout = Layout.parse(line)
    engine, source = make_engine(config, layout, world), open_data(config)
    part = engine.mesh.coords["dp"], layout.dp
    losses = [engine.step(source.batch(0, *part)).loss for _ in range(12)]
    elements: Counter[str] = Counter()
    states = [one for one in engine.fragments() if one.kind != "weight"]
    for one in states:
        elements[one.kind] += one.tensor.numel()
    return losses, dict(elements), {str(one.tensor.dtype) for one in states}


STATES = {
    "adamw": {"exp_avg": HIDDEN + REST, "exp_avg_sq": HIDDEN + REST},
    "lion": {"exp_avg": HIDDEN + REST},
    "muon": {"exp_avg": REST, "exp_avg_sq": REST, "momentum_buffer": HIDDEN},
}


@pytest.mark.parametrize("name", STATES)
def test_half_precision_trains_as_single_does_and_states_are_in_single(name: str, pool: Pool) -> None:
    """Divided too, and with gradients in half precision; each state once, of the weights that need it."""
    config = read(f"optimizer.name={name}")
    (truth,) = pool.run(course, config, "dtype=float32", ranks=1)
    assert truth[0][-1] < truth[0][0] - 0.05
    for line, ranks in (("dtype=bf16", 1), ("dp=2,zero=3,dtype=bf16{grads=bf16}", 2), ("tp=2,zero=1,dtype=bf16", 2)):
        found = pool.run(course, config, line, ranks=ranks)
        assert found[0][0] == pytest.approx(truth[0], rel=0.01)
        assert all(dtypes == {"torch.float32"} for _, _, dtypes in found)
        if "tp" not in line:
            total = sum((Counter(elements) for _, elements, _ in found), Counter())
            assert total == truth[1] == STATES[name]


def test_groups_that_match_nothing_are_refused_before_any_process_starts() -> None:
    config = read('optimizer.groups=[{match="blocks.0.atn.q.weight"}]')
    with pytest.raises(ConfigError, match=r"optimizer\.groups\.0\.match = .*did you mean 'blocks\.0\.attn\.q\.weight'"):
        fit(config, Layout(), 1)


def test_muon_for_a_module_without_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name = muon: the model has no matrix"):
        Engine(nn.LayerNorm(4), Layout(), optimizer=Optimizer(name="muon"), loss=lambda output, batch: output.sum())


def test_a_module_without_roles_trains_under_muon() -> None:
    """Every matrix of it is taken for a hidden one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    engine = Engine(
        module,
        Layout(),
        optimizer=Optimizer(name="muon", lr=0.3),
        loss=lambda output, batch: (output - batch["y"]).square().sum(),
    )
    x = torch.randn(16, 4)
    losses = [engine.step({"inputs": x, "y": x.sum(1, keepdim=True)}).loss for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]
    kinds = {one.piece.name: one.kind for one in engine.fragments() if one.kind == "momentum_buffer"}
    assert set(kinds) == {"0.weight", "2.weight"}
