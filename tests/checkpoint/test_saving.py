from __future__ import annotations

import errno
import os
import resource
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoint_ranks import LAYOUTS, TENSORS, folders, held, run_ranks, wrong
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shoal import checkpoint
from shoal.checkpoint import latest, load, read_manifest, save
from shoal.checkpoint.saving import written_by
from shoal.comm.world import World
from shoal.errors import CheckpointError
from shoal.placement import Fragment, Piece


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_each_box_is_written_once(layout: str, size: int) -> None:
    written = Counter(
        (fragment.kind, fragment.piece.name, fragment.piece.box)
        for rank in range(size)
        for fragment in written_by(rank, held(layout, rank, size, 0))
    )
    everywhere = {
        (fragment.kind, fragment.piece.name, fragment.piece.box)
        for rank in range(size)
        for fragment in held(layout, rank, size, 0)
    }
    assert written == Counter(everywhere)


def replicated(sizes: Sequence[int], copies: tuple[int, ...]) -> list[Fragment]:
    pieces = [Piece(f"w{i}", (n,), ((0, n),), ((0, n),)) for i, n in enumerate(sizes)]
    return [Fragment("weight", piece, copies, torch.empty(piece.shape)) for piece in pieces]


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 5), st.randoms())
def test_copies_are_divided_to_within_the_largest_box_whatever_their_order(
    sizes: list[int], ranks: int, order: Random
) -> None:
    fragments = replicated(sizes, tuple(range(ranks)))
    shares = [{fragment.piece.name for fragment in written_by(rank, fragments)} for rank in range(ranks)]
    loads = [sum(h.piece.numel for h in fragments if h.piece.name in share) for share in shares]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)
    order.shuffle(fragments)
    assert [{fragment.piece.name for fragment in written_by(rank, fragments)} for rank in range(ranks)] == shares


def test_the_bytes_of_a_model_are_even_over_its_replicas() -> None:
    layer = [4096, 1024, 1024, 4096, 11000, 11000, 11000, 64, 64]
    fragments = replicated([30000, *layer * 12, 64, 30000], (0, 2, 4, 6))
    loads = [sum(h.piece.numel for h in written_by(rank, fragments)) for rank in (0, 2, 4, 6)]
    assert max(loads) < 1.02 * min(loads)


def test_the_files_hold_the_logical_bytes_and_no_more(tmp_path: Path) -> None:
    run_ranks(4, lambda world: save(tmp_path / "run", 1, held("blocks", world.rank, 4, 1), {}, world), tmp_path)
    path = tmp_path / "run" / "step-00000001"
    files = [load_file(path / name) for name in read_manifest(path).files]
    stored = [sum(tensor.nbytes for tensor in file.values()) for file in files]
    assert sum(stored) == sum(2 * prod(shape) * dtype.itemsize for shape, dtype in TENSORS.values())
    assert len(files) == 4
    assert max(stored) < 1.3 * min(stored)
    assert folders(path) == ["manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in range(4))]


def failing(world: World, folder: Path, at: str, culprit: int) -> str:
    """Save step 2 with a fault of ``culprit``; returns what this rank then raises."""
    fragments = held("rows", world.rank, world.size, 2)

    def fault(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == culprit and at == "size limit":  # A real refusal of the kernel, half way through the file.
            big = Piece("embed2", (1 << 18,), ((0, 1 << 18),), ((0, 1 << 18),))
            fragments.append(Fragment("weight", big, (culprit,), torch.zeros(1 << 18)))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif world.rank == culprit:
            patch.setattr(*{"fsync": (os, "fsync"), "rename": (os, "rename"), "replace": (os, "replace")}[at], fault)
        with pytest.raises(CheckpointError) as caught:
            save(folder, 2, fragments, {}, world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("at", "culprit", "reason"),
    [
        ("size limit", 1, "[Errno 27] File too large"),
        ("fsync", 1, "[Errno 28] No space left on device"),
        ("rename", 0, "[Errno 28] No space left on device"),
        ("replace", 0, "[Errno 28] No space left on device"),
    ],
)
def test_a_failure_of_one_rank_is_raised_by_all_and_leaves_the_older_one(
    tmp_path: Path, at: str, culprit: int, reason: str
) -> None:
    run = tmp_path / "run"
    save(run, 1, held("whole", 0, 1, 1), {}, World())
    said = run_ranks(2, lambda world: failing(world, run, at, culprit), tmp_path)
    assert said == [f"rank {culprit}: cannot save step 2 to {run}: OSError: {reason}"] * 2
    left = {"replace": ["latest", "step-00000001", "step-00000002"]}  # It is whole, only not pointed to.
    assert folders(run) == left.get(at, ["latest", "step-00000001"])
    assert latest(run) == run / "step-00000001"
    assert load(run, loaded := held("rows", 0, 1, None), World())[0] == 1
    assert not wrong(loaded, 1)


def test_a_failed_swap_puts_the_replaced_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, held("whole", 0, 1, 1), {"try": 1}, World())
    rename, calls = os.rename, iter(range(9))

    def second_fails(source: Path, target: Path) -> None:
        if next(calls) == 1:
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(CheckpointError, match="PermissionError"):
        save(tmp_path, 1, held("whole", 0, 1, 1), {"try": 2}, World())
    assert folders(tmp_path) == ["latest", "step-00000001"]
    assert load(tmp_path, held("whole", 0, 1, None), World()) == (1, {"try": 1})


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=f"cannot save step 1 to {tmp_path}/file/run: NotADirectoryError"):
        save(tmp_path / "file" / "run", 1, [], {}, World())


def test_meta_that_is_not_json_and_tensors_that_are_not_covered_are_not_saved(tmp_path: Path) -> None:
    fragments = held("rows", 0, 2, 1)
    with pytest.raises(CheckpointError, match="no file holds"):
        save(tmp_path, 1, [Fragment(h.kind, h.piece, (0,), h.tensor) for h in fragments], {}, World())
    with pytest.raises(CheckpointError, match="not JSON compliant"):
        save(tmp_path, 1, held("whole", 0, 1, 1), {"loss": float("nan")}, World())
    assert folders(tmp_path) == []


def test_verify_reads_everything_and_finds_a_flipped_bit(tmp_path: Path) -> None:
    path = save(tmp_path, 1, held("whole", 0, 1, 1), {}, World())
    heard: list[tuple[int, int]] = []
    assert checkpoint.verify(path, lambda done, total: heard.append((done, total))).step == 1
    shard = path / "rank-00000.safetensors"
    assert heard[-1] == (shard.stat().st_size, shard.stat().st_size)
    damaged = bytearray(shard.read_bytes())
    damaged[-3] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="rank-00000"):
        checkpoint.verify(path)
