from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint_ranks import folders, held, wrong

from shoal.checkpoint import latest, load, resolve, save
from shoal.comm.world import World
from shoal.errors import CheckpointError


def put(folder: Path, *steps: int, keep: int | None = None) -> list[Path]:
    return [save(folder, step, held("whole", 0, 1, step), {}, World(), keep) for step in steps]


def test_a_run_resolves_to_its_latest_and_a_checkpoint_to_itself(tmp_path: Path) -> None:
    first, second = put(tmp_path, 10, 20)
    assert (first.name, second.name) == ("step-00000010", "step-00000020")
    assert latest(tmp_path) == resolve(tmp_path) == resolve(second) == second
    assert resolve(first) == first


def test_the_latest_is_the_last_one_saved_even_after_going_back(tmp_path: Path) -> None:
    _, _, again = put(tmp_path, 10, 20, 10)
    assert latest(tmp_path) == again
    assert folders(tmp_path) == ["latest", "step-00000010", "step-00000020"]


def test_where_no_checkpoint_is_resolve_says_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert latest(path) is None
        with pytest.raises(CheckpointError, match=f"checkpoint = {path}: no checkpoint is there; name a folder"):
            resolve(path)


@pytest.mark.parametrize(
    "pointer", [None, b"", b"\xff\x00", b"step-00000099\n", b"../step-00000010\n", b"/etc\n", b"step-1"]
)
def test_without_a_good_pointer_the_highest_complete_step_is_found(tmp_path: Path, pointer: bytes | None) -> None:
    _, second, third = put(tmp_path, 10, 20, 30)
    (third / "rank-00000.safetensors").unlink()
    (tmp_path / "step-00000040").mkdir()
    (tmp_path / "step-00000050.tmp-0123abcd").mkdir()
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_bytes(pointer)
    assert latest(tmp_path) == second


def test_a_damaged_latest_is_reported_not_passed_over(tmp_path: Path) -> None:
    _, second = put(tmp_path, 10, 20)
    (second / "manifest.json").unlink()
    assert latest(tmp_path) == second
    with pytest.raises(CheckpointError, match=r"step-00000020: damaged: manifest.json cannot be read"):
        load(tmp_path, held("whole", 0, 1, None), World())


def test_only_the_highest_steps_and_the_latest_are_kept(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3, 4, keep=2)
    assert folders(tmp_path) == ["latest", "step-00000003", "step-00000004"]
    put(tmp_path, 2, keep=1)
    assert folders(tmp_path) == ["latest", "step-00000002", "step-00000004"]
    assert wrong(loaded := held("whole", 0, 1, None), 2)
    assert load(tmp_path, loaded, World()) == (2, {})
    assert not wrong(loaded, 2)


def test_a_checkpoint_set_aside_is_still_the_one_pointed_to(tmp_path: Path) -> None:
    _, _, again = put(tmp_path, 10, 20, 10)
    aside = again.rename(tmp_path / "step-00000010.old")
    assert latest(tmp_path) == aside


def test_what_is_half_deleted_is_no_longer_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(path: Path) -> None:
        (path / "rank-00000.safetensors").unlink()
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stops)
        put(tmp_path, 1, 2, keep=1)
    half, *others = (path for path in sorted(tmp_path.iterdir(), reverse=True) if path.name.startswith("step-00000001"))
    assert ".tmp-" in half.name
    assert not others
    put(tmp_path, 3)
    assert folders(tmp_path) == ["latest", "step-00000002", "step-00000003"]


def test_the_next_save_clears_what_dead_ones_left_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, 10)
    (tmp_path / "step-00000010").rename(tmp_path / "step-00000010.old")
    for name in ("step-00000020.tmp-0123abcd", "step-00000005.old.tmp-0123abcd", "notes", "step-x.tmp-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "latest.tmp-00000000").write_text("x")
    put(tmp_path, 20)
    assert folders(tmp_path) == ["latest", "notes", "step-00000010", "step-00000020", "step-x.tmp-1"]
