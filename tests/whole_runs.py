"""What the tests of whole runs share: a small text, a run file on it, and the command in this process or in its own."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import cli
from shoal.data.corpus import Corpus
from shoal.data.tokenize import byte_tokenizer, tokenize
from shoal.train import launch
from shoal.train.pool import warm

KJV = Path(__file__).parent.parent / "data" / "kjv.txt"
COMMAND = "from shoal.cli import main; main()"
"""What the installed ``shoal`` runs, for ``python -c``."""

RUN = """
[run]
name = "run"
folder = "{folder}"
steps = 20

[model]
layers = 3
hidden = 48
heads = 6
ffn = 50
vocab = 259
dropout = 0.1

[data]
path = "{store}"
seq_len = 32
batch = 24
validation = 0.02

[optimizer]
clip = 0.5

[schedule]
warmup = 2

[evaluation]
batches = 3

[log]
hashes = true

[layout]
dp = 2
dtype = "float64"
"""


def make_store(folder: Path, size: int = 200_000) -> Path:
    """A token store of the first ``size`` bytes of the Bible, a byte a token."""
    text, store = folder / "text.txt", folder / "text.store"
    text.write_bytes(KJV.read_bytes()[:size])
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenize(Corpus.find(text), folder / "tokenizer.json", store, workers=1)
    return store


def write_run(folder: Path, store: Path) -> Path:
    """A run file in ``folder``, whose run goes to ``folder/out/run``."""
    path = folder / "run.toml"
    path.write_text(RUN.format(folder=folder / "out", store=store), encoding="utf-8")
    return path


def sets(**settings: object) -> list[str]:
    """``run__steps=3`` as the arguments ``--set run.steps=3``."""
    return [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def events(folder: Path, event: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [values for line in lines if (values := json.loads(line))["event"] == event]


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str


class Shoal:
    """Runs the command in this process, as the installed script does."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capfd, self._monkeypatch = capfd, monkeypatch
        # One thread a rank: a pool of threads that this process has used would not survive the fork.
        monkeypatch.setattr(launch, "_cpus", lambda: 1)

    def __call__(self, *arguments: object) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        self._capfd.readouterr()
        code: int | str | None = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        assert isinstance(code, int | None), code
        return Ended(code or 0, *self._capfd.readouterr())


class Apart:
    """The command in a process of its own, forked from this one, which has imported PyTorch: as the installed script,
    but there at once. ``plant`` is called first, in that process alone."""

    def __init__(self, arguments: Sequence[object], output: Path, plant: Callable[[], None] = lambda: None) -> None:
        self._output = output
        warm()
        self.pid = os.fork()
        if self.pid == 0:
            code = 120  # the interpreter's own, when it cannot write at exit
            try:
                code = _as_script(list(map(str, arguments)), output, plant)
            finally:
                os._exit(code)

    def ranks(self, count: int = 2) -> list[int]:
        """The processes of its ranks, in order; waits until there are ``count``."""
        return until(lambda: len(found := children(self.pid)) == count and sorted(found), 30)

    def end(self, seconds: float) -> Ended:
        """Wait for its end; the code is negative for a signal. Fails with the stacks of a process that does not end."""
        try:
            status = until(lambda: (done := os.waitpid(self.pid, os.WNOHANG))[0] and done, seconds)[1]
        except AssertionError as error:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)
            raise AssertionError(f"{error}: {self._said()}") from None
        return Ended(os.waitstatus_to_exitcode(status), *self._said())

    def _said(self) -> tuple[str, str]:
        out, err = (self._output.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".out", ".err"))
        return out, err


def _as_script(arguments: list[str], output: Path, plant: Callable[[], None]) -> int:
    try:
        os.setsid()
        faulthandler.disable()  # its report of a planted crash would go to the terminal
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(output.with_suffix(suffix), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        sys.argv = ["shoal", *arguments]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        launch._cpus = lambda: 1
        plant()
        cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)


def until(found: Callable[[], Any], seconds: float) -> Any:
    """Wait until ``found()`` is true, and return it; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
    return result


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def alive(pid: int) -> bool:
    """Whether the process still runs (one that has ended and waits to be reaped does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def ended(pids: Sequence[int]) -> Iterator[None]:
    """Whatever happens inside, the processes are gone after it."""
    try:
        yield
    finally:
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def refused(result: Ended, *words: str) -> None:
    """The command ended with a message of one error that has the ``words``, and nothing else."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 16
    path.write_bytes(contents)
