"""The feed-forward of a layer with experts: a gate sends each token to a few of them.

    y = Σ_e weight_e(x) · expert_e(x)  +  shared(x)

with experts that are gated feed-forwards. Their matrices lie one after another, [E·2F, H] and [E·H, F], so that all of
a layer's experts are two parameters; their logical names are those of single experts. What the gate looks at are whole
sequences (:mod:`shoal.model.gates`), of which a device may have some tokens: :class:`Tokens` has them all.

Axes in names: B samples, T positions, H hidden, N tokens, S sequences, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.config import Model as Shape
from shoal.model import gates
from shoal.model.activations import Activation
from shoal.model.choice import Choice
from shoal.model.context import Context
from shoal.model.gates import Gate
from shoal.model.grouped import expert_outputs
from shoal.model.linear import Linear


class Taken(Protocol):
    """The tokens that a device routes, and the sequences they are of."""

    @property
    def rows(self) -> Tensor:
        """[N, H]."""

    @property
    def sharers(self) -> int:
        """How many devices have tokens of these sequences."""

    def of_all(self, scores_NE: Tensor) -> Tensor:
        """The scores [S, T, E] of all tokens of the sequences. Every device goes on alike from them."""

    def of_own(self, found_STE: Tensor) -> Tensor:
        """Of what was found for all, that of the tokens here, [N, E]."""

    def counted(self) -> Tensor:
        """By how many positions each of the sequences counts in the loss, [S]."""

    def give_back(self, y_NH: Tensor) -> Tensor:
        """What was made of the tokens, where and as the stream was."""


class AllTokens:
    """Those of whole sequences, which are all here."""

    sharers = 1

    def __init__(self, x_BTH: Tensor, ctx: Context) -> None:
        self.rows, self._shape, self._ctx = x_BTH.flatten(0, 1), x_BTH.shape, ctx

    def of_all(self, scores_NE: Tensor) -> Tensor:
        whole: Tensor = scores_NE.unflatten(0, self._shape[:2])
        return whole

    def of_own(self, found_STE: Tensor) -> Tensor:
        return found_STE.flatten(0, 1)

    def counted(self) -> Tensor:
        assert self._ctx.counted is not None, "losses are of positions with labels"
        return self._ctx.counted

    def give_back(self, y_NH: Tensor) -> Tensor:
        return y_NH.view(self._shape)


class Tokens(nn.Module):
    """Takes the tokens that this device routes out of the stream."""

    def forward(self, x_BTH: Tensor, ctx: Context) -> Taken:
        return AllTokens(x_BTH, ctx)


class Router(Linear):
    """Scores of the experts, and where a bias balances them, that: a buffer, which no gradient reaches."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.hidden, shape.experts, bias=False)
        self.balance: Tensor | None
        # On a device of its own accord: it has values, whatever weights have on the meta device.
        bias = torch.zeros(shape.experts, dtype=torch.float32, device="cpu") if shape.gate == "sigmoid" else None
        self.register_buffer("balance", bias)
        self.rate = shape.bias_rate

    @property
    def balances(self) -> bool:
        """Whether a bias answers uneven load."""
        return self.balance is not None and self.rate > 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """The bias moves with the rest, but keeps its precision and values: steps of a thousandth add up in it."""
        bias, self.balance = self.balance, None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None:
            device = fn(torch.empty(0, device=bias.device)).device
            self.balance = bias if device.type == "meta" else bias.to(device)
        return self


class Stack(nn.Module):
    """A matrix of each of several experts, one after another: ``weight`` [E·out, in]."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts * out_features, in_features))


class Experts(nn.Module):
    """All experts of a layer, on one device."""

    def __init__(self, shape: Shape, activation: Activation) -> None:
        super().__init__()
        self.experts, self.activation = shape.experts, activation
        self.gate_up = Stack(shape.experts, shape.hidden, 2 * shape.expert_width)
        self.down = Stack(shape.experts, shape.expert_width, shape.hidden)

    def forward(
        self, rows_NH: Tensor, choice: Choice, weights_NE: Tensor, meanwhile: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Σ_e weight_e · expert_e of the ``rows``, over the experts chosen for each; and what is made ``meanwhile``,
        while tokens are on their way."""
        tokens, experts = choice.pairs()
        counts = choice.counts().tolist()
        made = expert_outputs(
            rows_NH.index_select(0, tokens), self.gate_up.weight, self.down.weight, counts, self.activation
        )
        return combine(made, tokens, weights_NE[tokens, experts], len(rows_NH)), meanwhile()


def combine(made_MH: Tensor, tokens_M: Tensor, weights_M: Tensor, tokens: int) -> Tensor:
    """[N, H]: to each of so many ``tokens`` what experts have made of it, weighted, in the order of experts."""
    y: Tensor = _Combine.apply(made_MH, tokens_M, weights_M.to(made_MH.dtype), tokens)  # type: ignore[no-untyped-call]
    return y


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, tokens: Tensor, weights: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(made, tokens, weights)
        return add_rows(made * weights[:, None], tokens, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        made, tokens, weights = ctx.saved_tensors
        rows = grad.index_select(0, tokens)
        grad_weights = torch.linalg.vecdot(rows, made)
        return rows.mul_(weights[:, None]), None, grad_weights, None


def add_rows(rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """[count, …] of ``rows``, each added to that of its token, always in one order."""
    out = rows.new_zeros(count, *rows.shape[1:])
    if rows.is_cuda:  # index_add_ there adds in any order
        return out.index_put_((tokens,), rows, accumulate=True)
    return out.index_add_(0, tokens, rows)


class Routed(nn.Module):
    """A router, experts, and beside them a ``shared`` feed-forward, if there is one, which every token takes."""

    def __init__(self, shape: Shape, name: str, activation: Activation, shared: nn.Module | None) -> None:
        super().__init__()
        self.name, self.gate = name, Gate.of(shape)
        self.gate_at_rest = self.gate.at_rest()
        self.balance, self.z = shape.balance_loss, shape.gate_z_loss
        self.tokens, self.router = Tokens(), Router(shape)
        self.experts, self.shared = Experts(shape, activation), shared

    def forward(self, x_BTH: Tensor, ctx: Context) -> Tensor:
        taken: Taken = self.tokens(x_BTH, ctx)
        rows_NH, gate = taken.rows, self.gate if self.training else self.gate_at_rest
        scores_NE = self.router(rows_NH)
        losses = (self.balance > 0 or self.z > 0) and ctx.counted is not None and torch.is_grad_enabled()
        if gate.looks_around or losses:
            scores_STE = taken.of_all(scores_NE)
            chosen_STE = gates.choose(scores_STE, gate, self.router.balance)
            chosen_NE, kept_NE = taken.of_own(chosen_STE), taken.of_own(gates.keep(chosen_STE, gate))
            length = scores_STE.shape[1]
        else:
            chosen_NE = kept_NE = gates.choose(scores_NE[None], gate, self.router.balance)[0]
            length = len(scores_NE)
        weights_NE = gates.weigh(scores_NE, chosen_NE, gate)
        if losses:
            loss = self._losses(scores_STE, chosen_STE, taken)
            weights_NE = ctx.beside.charge(self.name, weights_NE, loss, taken.sharers)
        ctx.beside.note(self.name, chosen_NE, kept_NE)
        choice = Choice(kept_NE, gate.even_share(length))
        y_NH, shared_BTH = self.experts(rows_NH, choice, weights_NE, lambda: self.shared and self.shared(x_BTH))
        y_BTH = taken.give_back(y_NH)
        return y_BTH if shared_BTH is None else y_BTH + shared_BTH

    def _losses(self, scores_STE: Tensor, chosen_STE: Tensor, taken: Taken) -> Tensor:
        """Those of the sequences, each as often as it has positions that count, so that the step's denominator makes
        of their sum the mean over such positions."""
        each_S = scores_STE.new_zeros(len(scores_STE), dtype=gates.widened(scores_STE).dtype)
        if self.balance:
            each_S = each_S + self.balance * gates.balance_loss(scores_STE, chosen_STE, self.gate)
        if self.z:
            each_S = each_S + self.z * gates.z_loss(scores_STE)
        return each_S @ taken.counted().to(each_S.dtype)
