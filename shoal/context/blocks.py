"""Attention on a block of scores at a time, none of which is ever held whole.

A block's result comes with the logarithm of the sum that its softmax divided by (log-sum-exp, L). Two results of the
same queries, with different keys, merge into that of all keys (Rabe & Staats 2021, FlashAttention):

    L ← log(e^L + e^Lb)        O ← O + e^(Lb − L) · (Ob − O)

in float32 or wider. Backward nothing need be merged: with the L and O of *all* keys, probabilities are e^(score − L)
and the gradients of blocks add up. Blocks whose queries see all keys, or all up to their own place, go through torch's
own kernels where those give L; others, and on other devices all, through plain arithmetic on as many rows as make
:data:`CHUNK` scores.

Axes in names: B samples, K key/value heads, G query heads that share one, Q queries, S keys, D head_dim; M rows of a
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.context.plan import Block, Sight

At = tuple[int | slice, ...]
Three = tuple[Tensor, Tensor, Tensor]

CHUNK = 1 << 20
"""Scores of all heads and samples that exist at one moment where no kernel takes the block."""


@dataclass(frozen=True)
class Result:
    """What queries have found so far: ``out`` [B, K, G, Q, D] and ``lse`` [B, K, G, Q], float32 or wider."""

    out: Tensor
    lse: Tensor

    @classmethod
    def of_nothing(cls, q_BKGQD: Tensor) -> Result:
        """That of queries which have seen no key."""
        exact = torch.promote_types(q_BKGQD.dtype, torch.float32)
        lse = torch.full(q_BKGQD.shape[:-1], -torch.inf, dtype=exact, device=q_BKGQD.device)
        return cls(torch.zeros_like(q_BKGQD, dtype=exact), lse)

    def merge(self, at: At, out: Tensor, lse: Tensor) -> None:
        """Take in the result of the queries ``at`` with other keys. Queries that see none of them have an ``lse`` of
        −∞, and stay as they are."""
        mine, log_sum = self.out[at], self.lse[at]
        both = torch.logaddexp(log_sum, lse)
        share = (lse - both).exp_().nan_to_num_(0.0)
        mine.lerp_(out.to(mine.dtype), share[..., None])
        log_sum.copy_(both)


class Saved(NamedTuple):
    """What a backward pass needs of the queries: they, the whole result, and the gradient of its ``out``, which has
    the dtype of the queries."""

    q: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor

    def at(self, at: At) -> Saved:
        """Those of some of the queries."""
        return Saved(*(one[at] for one in self))


def attend(q_BKGQD: Tensor, kv_2BKSD: Tensor, block: Block, sight: Sight, result: Result) -> None:
    """Merge what the queries of ``block`` find among its keys into ``result``."""
    k, v = kv_2BKSD[:, :, :, block.keys]
    if block.kind == "masked" or not _has_kernel(q_BKGQD):
        for rows, columns, hidden in _chunks(q_BKGQD, block, sight):
            at = _queries(rows)
            result.merge(at, *_plain(q_BKGQD[at], k[:, :, columns], v[:, :, columns], hidden))
        return
    for head in range(q_BKGQD.shape[2]):  # keys and values are not repeated for the heads that share them
        at = _queries(block.queries, head)
        result.merge(at, *_kernel(q_BKGQD[at], k, v, block.kind == "causal"))


def attend_backward(
    saved: Saved, kv_2BKSD: Tensor, block: Block, sight: Sight, dq_BKGQD: Tensor, dkv_2BKSD: Tensor
) -> None:
    """Add the gradients that ``block`` makes to those of all queries and keys here, which are float32 or wider."""
    k, v = kv_2BKSD[:, :, :, block.keys]
    dk, dv = dkv_2BKSD[:, :, :, block.keys]
    if block.kind == "masked" or not _has_kernel(saved.q):
        for rows, columns, hidden in _chunks(saved.q, block, sight):
            at, keys = _queries(rows), (slice(None), slice(None), columns)
            found = _plain_backward(saved.at(at), k[keys], v[keys], hidden)
            _add(found, dq_BKGQD[at], dk[keys], dv[keys])
        return
    for head in range(saved.q.shape[2]):
        at = _queries(block.queries, head)
        _add(_kernel_backward(saved.at(at), k, v, block.kind == "causal"), dq_BKGQD[at], dk, dv)


def _queries(rows: slice, head: int | slice = slice(None)) -> At:
    return slice(None), slice(None), head, rows


def _add(found: Three, *wholes: Tensor) -> None:
    for whole, one in zip(wholes, found, strict=True):
        whole += one


# ---- torch's kernels


def _has_kernel(q: Tensor) -> bool:
    """On a GPU the kernel takes half precision, and heads whose size 8 divides."""
    if q.device.type == "cuda":
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cpu"


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse of q [B, K, Q, D] with k and v [B, K, S, D]."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        found: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return found
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse


def _kernel_backward(saved: Saved, k: Tensor, v: Tensor, causal: bool) -> Three:
    q, out, lse, grad = saved
    aten = torch.ops.aten
    found: Three
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
        return found
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)  # of samples packed in one, and of dropout
    lengths = q.shape[2], k.shape[2]
    found = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, nothing, nothing
    )
    return found


# ---- plain arithmetic


def _chunks(q_BKGQD: Tensor, block: Block, sight: Sight) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Some queries of a block, those keys of it that one of them may see, and which of these, as :func:`_mask` says."""
    queries, keys = block.queries, block.keys.stop - block.keys.start
    per_score = q_BKGQD.shape[:3].numel()
    step = max(1, CHUNK // (per_score * keys))
    for start in range(queries.start, queries.stop, step):
        rows = slice(start, min(start + step, queries.stop))
        if block.kind == "full":
            yield rows, slice(0, keys), None
            continue
        # Places of the queries, counted from that of the first key.
        first = block.first_query - block.first_key + rows.start - queries.start
        last = first + rows.stop - rows.start - 1
        low = 0 if sight.window is None or block.kind == "causal" else max(0, first - sight.window + 1)
        columns = slice(low, min(keys, last + 1))
        if columns.stop > low:
            yield rows, columns, _mask(range(first, last + 1), columns, block, sight, q_BKGQD.device)


def _mask(queries: range, keys: slice, block: Block, sight: Sight, device: torch.device) -> Tensor:
    """bool [B or 1, 1, 1, M, S], True where a query must not look. Places count from that of the block's first key."""
    q = torch.arange(queries.start, queries.stop, device=device)
    k = torch.arange(keys.start, keys.stop, device=device)
    hidden = k > q[:, None]
    if block.kind == "masked":
        if sight.window is not None:
            hidden |= k <= q[:, None] - sight.window
        if sight.documents is not None:
            of_q, of_k = (sight.documents[:, block.first_key + place] for place in (q, k))
            hidden = hidden | (of_q[:, :, None] != of_k[:, None, :])
            return hidden[:, None, None]
    return hidden[None, None, None]


def _scores(q_BKGMD: Tensor, k_BKSD: Tensor, hidden: Tensor | None) -> Tensor:
    """[B, K, G, M, S], float32 or wider."""
    exact = torch.promote_types(q_BKGMD.dtype, torch.float32)
    scores = _times(q_BKGMD.to(exact) * q_BKGMD.shape[-1] ** -0.5, k_BKSD.to(exact).mT)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _times(x_BKGMX: Tensor, y_BKXY: Tensor) -> Tensor:
    """x·y for each key/value head, [B, K, G, M, Y]."""
    product: Tensor = (x_BKGMX.flatten(2, 3) @ y_BKXY).unflatten(2, x_BKGMX.shape[2:4])
    return product


def _over_rows(x_BKGMX: Tensor, y_BKGMY: Tensor) -> Tensor:
    """xᵀ·y over all queries of a key/value head, [B, K, X, Y]."""
    return x_BKGMX.flatten(2, 3).mT @ y_BKGMY.flatten(2, 3)


def _plain(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, hidden)
    lse = scores.logsumexp(dim=-1)
    p = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
    return _times(p, v.to(p.dtype)), lse


def _plain_backward(saved: Saved, k: Tensor, v: Tensor, hidden: Tensor | None) -> Three:
    """With P the probabilities: dv = Pᵀ·do, dS = P ∘ (do·vᵀ − Σ do ∘ o), dq = dS·k / √D and dk = dSᵀ·q / √D."""
    q, out, lse, grad = saved
    p = _scores(q, k, hidden).sub_(lse[..., None]).exp_()
    grad, scale = grad.to(p.dtype), q.shape[-1] ** -0.5
    dv = _over_rows(p, grad)
    ds = _times(grad, v.to(p.dtype).mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(p)
    return _times(ds, k.to(p.dtype)) * scale, _over_rows(ds, q.to(p.dtype)) * scale, dv
