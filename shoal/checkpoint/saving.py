"""Save: every rank writes its share of the boxes, each box once, and the whole appears at once or not at all."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.checkpoint.agree import together
from shoal.checkpoint.boxes import text
from shoal.checkpoint.folder import prepare, publish, retain, step_folder, tidy, write_synced
from shoal.checkpoint.manifest import JSON, MANIFEST, Manifest
from shoal.checkpoint.shards import dtype_code, write_shard
from shoal.comm.world import World
from shoal.errors import CheckpointError
from shoal.placement import Fragment

Share = dict[str, Any]


def save(
    folder: Path,
    step: int,
    fragments: Sequence[Fragment],
    meta: Mapping[str, JSON],
    world: World,
    keep: int | None = None,
) -> Path:
    """Write the checkpoint of ``step`` below the run's ``folder``, make it the latest, and return its path.

    All ranks call this with the same ``folder``, on a file system they share, and ``step``; the ``meta`` of rank 0 is
    kept. A checkpoint of the same step is replaced once the new one is complete. With ``keep``, only that many of the
    highest steps stay, and the latest.

    Raises :class:`CheckpointError`, the same on every rank, when any rank fails; the older checkpoint is then still
    the latest and nothing unfinished is left.
    """
    assert keep is None or keep > 0, f"keep = {keep}"
    leads, doing = world.rank == 0, f"cannot save step {step} to {folder}"
    final = step_folder(folder, step)

    _, started = together(
        lambda: prepare(folder, step) if leads else None,
        world,
        doing,
        share=lambda aside: [step, aside.name if aside else None],
    )
    assert all(other == step for other, _ in started), f"ranks save different steps: {started}"
    aside = folder / started[0][1]

    def finish(shares: Iterable[Share]) -> None:
        write_synced(aside / MANIFEST, _manifest(step, meta, shares).dumps())
        publish(aside, final)
        if keep is not None:
            retain(folder, keep)

    try:
        _, shares = together(
            lambda: _write(aside, written_by(world.rank, fragments), world.rank), world, doing, share=dict
        )
        together(lambda: finish(shares) if leads else None, world, doing)
    except CheckpointError:
        if leads:
            with suppress(OSError):  # What is left then, the next save clears.
                tidy(folder)
        raise
    return final


def written_by(rank: int, fragments: Sequence[Fragment]) -> list[Fragment]:
    """Those of the ``fragments`` of ``rank`` that it writes; the other copies of the rest are written elsewhere.

    The ranks that share one set of copies all hold the same boxes under it, so each of them can divide those boxes
    among all: the largest first, always to the rank with the fewest bytes so far. They agree without a word, and the
    bytes of the set are even to within its largest box.
    """
    sets: dict[tuple[int, ...], dict[Any, Fragment]] = defaultdict(dict)
    for fragment in fragments:
        sets[fragment.copies][(fragment.kind, fragment.piece.name, fragment.piece.box)] = fragment
    mine = []
    for copies, boxes in sets.items():
        assert rank in copies, f"rank {rank} holds what is listed at {copies}"
        written = [(0, other) for other in sorted(copies)]
        for _, fragment in sorted(boxes.items(), key=lambda item: (-item[1].tensor.nbytes, item[0])):
            so_far, writer = written[0]
            heapq.heapreplace(written, (so_far + fragment.tensor.nbytes, writer))
            if writer == rank:
                mine.append(fragment)
    return mine


def _write(aside: Path, fragments: Sequence[Fragment], rank: int) -> Share:
    """Write this rank's file, if it has anything to write; returns its entries of the manifest, as JSON."""
    if not fragments:
        return {}
    file = f"rank-{rank:05d}.safetensors"
    tensors: dict[str, dict[str, Any]] = defaultdict(dict)
    contents = {}
    for fragment in fragments:
        piece = fragment.piece
        key = f"{fragment.kind}/{piece.name}{text(piece.box)}"
        contents[key] = fragment.tensor
        entry = {"shape": piece.shape, "dtype": dtype_code(fragment.tensor, key), "boxes": []}
        entry = tensors[fragment.kind].setdefault(piece.name, entry)
        entry["boxes"].append({"box": piece.box, "file": file, "key": key})
    return {"files": {file: write_shard(aside / file, contents).model_dump()}, "tensors": tensors}


def _manifest(step: int, meta: Mapping[str, JSON], shares: Iterable[Share]) -> Manifest:
    """The manifest that the ranks' entries add up to. That they cover every tensor is validated with it."""
    files: Share = {}
    tensors: dict[str, Share] = defaultdict(dict)
    for share in filter(None, shares):
        files |= share["files"]
        for kind, entries in share["tensors"].items():
            for name, entry in entries.items():
                known = tensors[kind].setdefault(name, entry)
                if known is not entry:
                    same = known["shape"] == entry["shape"] and known["dtype"] == entry["dtype"]
                    assert same, f"ranks differ on {kind} {name}: {known} and {entry}"
                    known["boxes"] += entry["boxes"]
    return Manifest.model_validate({"step": step, "meta": meta, "files": files, "tensors": tensors})
