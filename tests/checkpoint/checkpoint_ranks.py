"""Ranks as forked processes, and a small model whose tensors lie on them in several ways."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.world import World
from shoal.placement import Box, Fragment, Piece

torch.set_num_threads(1)  # Threads do not survive a fork: none may be started before one.

FORK = multiprocessing.get_context("fork")
DEADLINE_S = 60.0

TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed": ((11, 6), torch.float32),
    "layer.in": ((12, 8), torch.float64),
    "layer.out": ((3, 5, 4), torch.float32),
    "norm": ((7,), torch.bfloat16),
    "scale": ((), torch.float32),
    "count": ((), torch.int64),
    "table": ((5,), torch.int32),
    "mask": ((4,), torch.bool),
}
LAYOUTS = ("whole", "rows", "columns", "blocks", "flat")


def contents(kind: str, name: str, step: int = 0) -> Tensor:
    """The full tensor of the model at ``step``; no two elements of neighbouring steps are alike where dtype allows."""
    shape, dtype = TENSORS[name]
    values = torch.arange(prod(shape), dtype=torch.float64).reshape(shape) + 100 * step + len(kind) + len(name)
    return (values % 2 if dtype == torch.bool else values).to(dtype)


def boxes(layout: str, shape: Sequence[int], rank: int, size: int) -> list[Box]:
    """What ``rank`` of ``size`` holds of a tensor. Sizes need not divide; a rank may hold nothing."""
    whole: Box = tuple((0, n) for n in shape)
    if layout == "whole" or not shape:
        return [whole]
    if layout == "rows":
        return [(_part(shape[0], rank, size), *whole[1:])]
    if layout == "columns":
        return [(*whole[:-1], _part(shape[-1], rank, size))]
    if layout == "blocks":  # Rows over pairs of ranks; inside a pair, columns: a vector has two copies.
        rows = _part(shape[0], rank // 2, (size + 1) // 2)
        pair = min(2, size - rank // 2 * 2)
        return [(rows, *whole[1:-1], _part(shape[-1], rank % 2, pair))] if len(shape) > 1 else [(rows,)]
    start, stop = _part(prod(shape), rank, size)  # A flat range, one row of the last dim at a time.
    found = []
    for flat in range(start - start % shape[-1], stop, shape[-1]):
        leading: list[tuple[int, int]] = []
        rest = flat // shape[-1]
        for n in reversed(shape[:-1]):
            rest, at = divmod(rest, n)
            leading.insert(0, (at, at + 1))
        found.append((*leading, (max(start, flat) - flat, min(stop, flat + shape[-1]) - flat)))
    return found


def held(
    layout: str, rank: int, size: int, step: int | None, kinds: Sequence[str] = ("weight", "exp_avg")
) -> list[Fragment]:
    """The fragments of ``rank``: the contents of ``step``, or, without one, values that are never saved."""
    found = []
    for kind in kinds:
        for name, (shape, dtype) in TENSORS.items():
            for box in boxes(layout, shape, rank, size):
                copies = tuple(other for other in range(size) if box in boxes(layout, shape, other, size))
                at = tuple(slice(start, stop) for start, stop in box)
                full = torch.full(shape, 77).to(dtype) if step is None else contents(kind, name, step)
                part = full[at].clone()
                found.append(Fragment(kind, Piece(name, shape, box, box), copies, part))
    return found


def wrong(fragments: Sequence[Fragment], step: int) -> list[str]:
    """The fragments that do not have the contents of ``step``."""
    return [
        f"{fragment.kind} {fragment.piece}"
        for fragment in fragments
        if not torch.equal(fragment.piece.of(contents(fragment.kind, fragment.piece.name, step)), fragment.tensor)
    ]


def run_ranks(size: int, work: Callable[[World], Any], scratch: Path) -> list[Any]:
    """``work`` on each rank of a new world; returns the results by rank, and fails with any rank's traceback."""
    store = scratch / f"store-{len(list(scratch.glob('store-*')))}"
    ranks = []
    for rank in range(size):
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_rank, args=(rank, size, str(store), work, there), daemon=True)
        process.start()
        there.close()
        ranks.append((process, here))
    try:
        replies = [_reply(rank, here) for rank, (_, here) in enumerate(ranks)]
    finally:
        for process, _ in ranks:
            process.join(5)
            process.kill()
    failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(replies) if not ok]
    assert not failed, "\n".join(failed)
    return [result for _, result in replies]


def _reply(rank: int, here: Connection) -> tuple[bool, Any]:
    try:
        return here.recv() if here.poll(DEADLINE_S) else (False, f"no answer in {DEADLINE_S} s")
    except EOFError:
        return False, "died"


def _rank(rank: int, size: int, store: str, work: Callable[[World], Any], there: Connection) -> None:
    try:
        with World(rank, size, dist.FileStore(store, size) if size > 1 else None, timeout_s=30) as world:
            there.send((True, work(world)))
    except BaseException:
        there.send((False, traceback.format_exc()))


def _part(n: int, rank: int, size: int) -> tuple[int, int]:
    return n * rank // size, n * (rank + 1) // size


def folders(folder: Path) -> list[str]:
    """The names in a run's folder, sorted."""
    return sorted(path.name for path in folder.iterdir())
