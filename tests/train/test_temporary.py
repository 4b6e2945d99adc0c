"""Where processes meet nothing is left, whichever way they end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from shoal.train.temporary import temporary_folder

LONG_AGO = time.time() - 3600


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_there_for_as_long_as_it_is_used(here: Path) -> None:
    with temporary_folder("meeting") as folder:
        assert [*here.iterdir()] == [folder]
    assert not [*here.iterdir()]


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_uses_is_not(here: Path) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        with temporary_folder("meeting") as folder:
            (folder / "store").write_text("met")
            os.utime(folder, (LONG_AGO, LONG_AGO))
            os.write(told, b"!")
            signal.pause()
        os._exit(1)
    os.read(ready, 1)
    (theirs,) = here.iterdir()
    with temporary_folder("meeting"):
        assert theirs.exists(), "its process is at work"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (here / "shoal-meeting-new").mkdir()
    (here / "shoal-other").mkdir()
    os.utime(here / "shoal-other", (LONG_AGO, LONG_AGO))
    with temporary_folder("meeting") as mine:
        assert {path.name for path in here.iterdir()} == {mine.name, "shoal-meeting-new", "shoal-other"}
