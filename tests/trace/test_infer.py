"""The roles inferred for users' modules, and the operators that stop what cannot be told."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from own_modules import MODULES, TABLES, batches, build
from torch import Tensor, nn

from shoal.errors import ConfigError, LayoutError
from shoal.model.roles import role_of
from shoal.tensor.inferred import InferredOneD
from shoal.trace.capture import capture
from shoal.trace.infer import Inferred, infer, table
from shoal.trace.sections import sections


@cache
def inferred(name: str) -> Inferred:
    return infer(capture(build(name), batches(name, 1, 6)[0]["inputs"]))


def of(module: nn.Module, inputs: Tensor) -> Inferred:
    return infer(capture(module, inputs))


SLOW = ("vit", "encoder")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.parity) if name in SLOW else name for name in MODULES]
)
def test_roles_are_those_that_a_person_would_write(name: str) -> None:
    found, module = inferred(name), build(name)
    for owner in {one.rpartition(".")[0] for one, _ in module.named_parameters(remove_duplicate=False)}:
        assert role_of(found.roles, owner) == role_of(TABLES[name], owner), owner


def test_the_table_tells_blocks_once_and_why_a_matrix_stays_whole() -> None:
    lines = table(inferred("llama")).splitlines()
    assert "model.layers.*.self_attn.q_proj          qkv, 4 heads of 2 groups" in lines
    assert sum("q_proj" in line for line in lines) == 1
    found = of(Mixed(), torch.randn(4, 6))
    assert "a  replicated   kept whole by aten.cumsum in the module" in table(found).splitlines()


class Mixed(nn.Module):
    """A pair that can be divided after one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).cumsum(-1))).relu())  # type: ignore[no-any-return]


class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).flip(-1)).cumsum(-1)  # type: ignore[no-any-return]


class Positional(Stopped):
    """What meets the columns is different for each of them, and every rank has all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * torch.arange(8.0)).cumsum(-1)  # type: ignore[no-any-return]


class Interleaved(nn.Module):
    """Gate and up side by side in one matrix: a pair of its rows is what may not be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).unflatten(-1, (8, 2)).unbind(-1)
        return self.down(F.silu(gate) * up).cumsum(-1)  # type: ignore[no-any-return]


class Strewn(Interleaved):
    """The second half of a row meets the first in another order."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)).cumsum(-1)  # type: ignore[no-any-return]


def test_rows_that_meet_are_one_granule() -> None:
    role = of(Interleaved(), torch.randn(4, 6)).roles["both"]
    assert (role.kind, role.heads, role.parts) == ("gate_up", 8, ())


def test_an_order_that_no_role_tells_stays_whole() -> None:
    found = of(Strewn(), torch.randn(4, 6))
    assert found.roles == {}


def test_a_cast_between_blocks_joins_none() -> None:
    captured = capture(Cast(), torch.randn(4, 6))
    assert len(sections(captured, infer(captured).spread.reached, torch.device("cpu"))[1]) == 3


class Cast(nn.Module):
    """A cast, which can be cut before and after, begins each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CastFirst() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CastFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        return x + self.linear(x)


@pytest.mark.parametrize(("module", "operator"), [(Stopped, "aten.flip"), (Positional, "aten.mul")])
def test_refused_with_the_operator_before_any_group_exists(module: type[nn.Module], operator: str) -> None:
    with pytest.raises(LayoutError, match=rf"{operator} in the module \(test_infer.py:\d+\).*; use dp, zero or pp"):
        InferredOneD(2, of(module(), torch.randn(4, 6)))


def test_heads_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"self_attn.q_proj has 2 groups of heads, .* over 4 ranks; use tp=2"):
        InferredOneD(4, inferred("llama"))


class Dropping(nn.Sequential):
    pass


def test_dropout_is_refused_by_name() -> None:
    module = Dropping(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 6))
    with pytest.raises(LayoutError, match=r"draw different numbers for aten.dropout in 1 .*set its rate to 0"):
        InferredOneD(2, of(module, torch.randn(4, 6)))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else x


class Moody(nn.Module):
    """Another module in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).relu() if self.training else self.a(x)  # type: ignore[no-any-return]


class Quiet(nn.Module):
    """A part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x)
        return x + y


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Branches, "cannot be traced: .*; use dp or zero"),
        (Moody, "another one in evaluation from aten.relu in the module"),
        (Quiet, "cannot be traced past wrap_with_set_grad_enabled"),
        (lambda: nn.BatchNorm1d(6), "writes to the buffer num_batches_tracked"),
    ],
)
def test_what_a_graph_would_not_tell_is_refused(module: type[nn.Module], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        capture(module(), torch.randn(4, 6))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mlp", 4),
        pytest.param("vit", 6, marks=pytest.mark.parity),
        pytest.param("encoder", 2, marks=pytest.mark.parity),
        ("odd", 7),
        ("llama", 5),
        ("gpt2", 6),
    ],
)
def test_layers_are_cut_between_blocks_and_compute_what_the_module_does(name: str, layers: int) -> None:
    module, batch = build(name), batches(name, 1, 6)[0]
    captured = inferred(name).spread.captured
    prelude, found = sections(captured, inferred(name).spread.reached, torch.device("cpu"))
    assert len(found) == layers
    captured.module.load_state_dict(module.state_dict())
    ctx = prelude({"inputs": batch["inputs"][:4]})
    x = batch["inputs"][:4]
    for layer in found:
        x = layer(x, ctx)
    expected = module(batch["inputs"][:4])
    for ours, theirs in ((x, expected),) if isinstance(x, Tensor) else ((x.logits, expected.logits),):
        assert torch.equal(ours, theirs)
