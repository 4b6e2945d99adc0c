from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import LAYOUTS, held, run_ranks, wrong
from safetensors import safe_open

from shoal.checkpoint import load, read_manifest, save
from shoal.comm.world import World
from shoal.errors import CheckpointError
from shoal.placement import Fragment, Piece

META: dict[str, Any] = {"tokens": 12, "seed": None}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder for each layout, all saved by four ranks at step 5."""
    root = tmp_path_factory.mktemp("saved")

    def work(world: World) -> None:
        for layout in LAYOUTS:
            save(root / layout, 5, held(layout, world.rank, world.size, 5), META, world)

    run_ranks(4, work, root)
    return root


@pytest.mark.parametrize("size", [1, 2, 3])
def test_saved_by_four_ranks_under_any_layout_loaded_by_fewer_under_any_other(
    saved: Path, size: int, tmp_path: Path
) -> None:
    def work(world: World) -> list[str]:
        faults = []
        for before in LAYOUTS:
            for after in LAYOUTS:
                fragments = held(after, world.rank, world.size, None)
                assert load(saved / before, fragments, world) == (5, META)
                faults += [f"{before} → {after}: {fault}" for fault in wrong(fragments, 5)]
        return faults

    assert run_ranks(size, work, tmp_path) == [[]] * size


def test_saved_by_one_rank_loaded_by_two(tmp_path: Path) -> None:
    save(tmp_path / "run", 6, held("whole", 0, 1, 6), {}, World())

    def work(world: World) -> list[str]:
        fragments = held("columns", world.rank, world.size, None)
        load(tmp_path / "run", fragments, world)
        return wrong(fragments, 6)

    assert run_ranks(2, work, tmp_path) == [[], []]


def test_floating_dtypes_are_cast_and_views_written_through(saved: Path) -> None:
    base = torch.zeros(20, 6, dtype=torch.float64)
    piece = Piece("embed", (11, 6), ((2, 9), (0, 6)), ((0, 7), (0, 6)))
    others = [h for h in held("whole", 0, 1, None, ("weight",)) if h.piece.name != "embed"]
    load(saved / "columns", [Fragment("weight", piece, (0,), base[3:10]), *others], World())
    expected = next(h.tensor for h in held("whole", 0, 1, 5, ("weight",)) if h.piece.name == "embed")
    assert torch.equal(base[3:10], expected[2:9].double())
    assert not base[:3].any()
    assert not base[10:].any()


def test_a_parameter_that_requires_grad_is_filled(tmp_path: Path) -> None:
    piece = Piece("w", (3,), ((0, 3),), ((0, 3),))
    save(tmp_path, 1, [Fragment("weight", piece, (0,), torch.nn.Parameter(torch.arange(3.0)))], {}, World())
    parameter = torch.nn.Parameter(torch.zeros(3))
    load(tmp_path, [Fragment("weight", piece, (0,), parameter)], World())
    assert parameter.tolist() == [0, 1, 2]
    assert parameter.grad_fn is None


def test_only_the_slices_that_a_rank_holds_are_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.shard = safe_open(*args, **kwargs)

        def __enter__(self) -> Spy:
            self.open: Any = self.shard.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.shard.__exit__(*args)

        def get_slice(self, key: str) -> Any:
            view = self.open.get_slice(key)

            class Slice:
                def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
                    found: torch.Tensor = view[part]
                    read.append(found.numel())
                    return found

            return Slice()

    monkeypatch.setattr("shoal.checkpoint.loading.safe_open", Spy)
    fragments = held("columns", 1, 3, None)
    names = {fragment.piece.name for fragment in fragments}
    assert names == read_manifest(saved / "rows" / "step-00000005").tensors["weight"].keys()
    load(saved / "rows", fragments, World())
    assert sum(read) == sum(fragment.tensor.numel() for fragment in fragments)


def test_optimizer_states_may_be_left_out(saved: Path) -> None:
    weights = held("whole", 0, 1, None, ("weight",))
    load(saved / "flat", weights, World())
    assert not wrong(weights, 5)


def refused(path: Path, fragments: list[Fragment], message: str) -> None:
    """Loading fails with ``message`` and fills nothing."""
    before = [fragment.tensor.clone() for fragment in fragments]
    with pytest.raises(CheckpointError, match=message):
        load(path, fragments, World())
    assert all(torch.equal(a, h.tensor) for a, h in zip(before, fragments, strict=True))


def model(**shapes: tuple[int, ...]) -> list[Fragment]:
    found = []
    for name, shape in shapes.items():
        box = tuple((0, n) for n in shape)
        found.append(Fragment("weight", Piece(name, shape, box, box), (0,), torch.full(shape, 3.0)))
    return found


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    save(tmp_path, 1, model(a=(2, 3), b=(4,)), {}, World())
    refused(tmp_path, model(a=(2, 3), b=(5,)), r"of another model: weight b has shape \(4,\) in it and \(5,\) in the")
    refused(tmp_path, model(a=(2, 3), b=(4,), c=(1,)), "of another model: weight c is not in it; load")
    refused(tmp_path, model(a=(2, 3)), "of another model: weight b is not in the model; load")
    many = model(a=(2, 3), b=(4,), **{f"c{i}": (1,) for i in range(5)})
    refused(tmp_path, many, "weight c0 is not in it; weight c1 is not in it; weight c2 is not in it; and 2 more;")
    whole = model(a=(2, 3), b=(4,))
    refused(tmp_path, [Fragment("exp_avg", h.piece, (0,), h.tensor) for h in whole] + whole, "exp_avg a is not in it")
    integer = [Fragment(h.kind, h.piece, (0,), h.tensor.int()) for h in whole]
    refused(tmp_path, integer, "weight a has dtype F32 in it and I32 in the model")


def test_a_weight_counts_as_in_the_model_when_any_rank_holds_it(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, model(a=(2,), b=(3,), c=(1,)), {}, World())

    def work(world: World) -> str:
        load(tmp_path / "run", model(a=(2,), c=(1,)) if world.rank else model(b=(3,)), world)
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / "run", model(a=(2,)) if world.rank else model(b=(3,)), world)
        return str(caught.value)

    said = run_ranks(2, work, tmp_path)
    assert said[0] == said[1]
    assert "weight c is not in the model" in said[0]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "zero"])
def test_damage_that_one_rank_finds_is_raised_by_all(saved: Path, tmp_path: Path, harm: str) -> None:
    run = tmp_path / "run"
    save(run, 5, held("whole", 0, 1, 5), META, World())
    path = run / "step-00000005" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[-5] ^= 4
    if harm == "zero":
        data[-64:] = bytes(64)
    path.write_bytes(data[:-3] if harm == "cut" else data)
    if harm == "remove":
        path.unlink()

    def work(world: World) -> tuple[str, bool]:
        fragments = held("rows", world.rank, world.size, None)
        with pytest.raises(CheckpointError) as caught:
            load(run, fragments, world)
        untouched = held("rows", world.rank, world.size, None)
        same = all(torch.equal(a.tensor, b.tensor) for a, b in zip(fragments, untouched, strict=True))
        return str(caught.value), same

    said = run_ranks(2, work, tmp_path)
    assert said[0] == said[1]
    assert said[0][1], "nothing is filled"
    expected = {
        "flip": "rank 0: checkpoint file = {path}: damaged: its checksum is crc32:",
        "zero": "rank 0: checkpoint file = {path}: damaged: its checksum is crc32:",
        "cut": f"rank-00000.safetensors has {len(data) - 3} bytes and should have {len(data)}",
        "remove": "rank-00000.safetensors cannot be read: No such file",
    }
    assert expected[harm].format(path=path) in said[0][0]


def test_ranks_that_see_different_checkpoints_do_not_mix_them(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / str(rank), 1, model(a=(rank + 2,)), {}, World())

    def work(world: World) -> str:
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / str(world.rank), model(a=(world.rank + 2,)), world)
        return str(caught.value)

    assert all("the ranks see different checkpoints there" in text for text in run_ranks(2, work, tmp_path))
