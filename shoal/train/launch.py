"""Where the processes of a run come from: started here, or by torchrun or Slurm, whose ranks this process joins."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NoReturn

from shoal import checkpoint
from shoal.comm.world import World, init
from shoal.config import Config
from shoal.errors import ConfigError, RankFailed, ShoalError, Stopped, setting
from shoal.layout import Layout
from shoal.train.asked import NOTHING, Asked
from shoal.train.folder import run_folder
from shoal.train.loop import train
from shoal.train.metrics import Sink
from shoal.train.pool import Pool

Watch = Callable[[], Sequence[Sink]]
Ready = Callable[[], AbstractContextManager[None]]
"""Entered once, before training: checks what the run needs and holds its folder."""


def launched() -> int | None:
    """How many ranks a launcher has started, this process among them; None where there is no launcher."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _whole("WORLD_SIZE")
    if "SLURM_PROCID" in os.environ and "SLURM_NTASKS" in os.environ:
        # A Slurm job of one task is a shell on some machine, from which processes can be started.
        return size if (size := _whole("SLURM_NTASKS")) != 1 else None
    return None


def train_here(config: Config, layout: Layout, watch: Watch, ready: Ready, asked: Asked = NOTHING) -> None:
    """The whole run, in processes of this machine. Raises what a rank raised first, or :class:`Stopped`."""
    threads = max(1, _cpus() // layout.ranks)
    with _ending_well(config), ready(), Pool(layout.ranks, threads=threads) as pool:
        pool.run(train, config, layout, watch, asked, timeout_s=config.run.timeout, device=config.run.device)


def train_joined(
    config: Config,
    layout: Layout,
    watch: Watch,
    ready: Ready,
    asked: Asked = NOTHING,
    choose: Callable[[], Layout] | None = None,
) -> None:
    """This process's part of a run whose ranks a launcher has started. The first rank may ``choose`` the layout."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher says what happened, once for all ranks
    with init(device=config.run.device, timeout_s=config.run.timeout) as world, ExitStack() as held:
        if choose is not None:
            layout = Layout.parse(_on_first_rank(world, lambda: str(choose())))
            config = config.model_copy(update={"layout": layout.table()})

        def enter() -> str:
            held.enter_context(ready())
            return ""

        _on_first_rank(world, enter)
        train(world, config, layout, watch, asked)


def _on_first_rank(world: World, work: Callable[[], str]) -> str:
    """Do ``work`` on the first rank, and go on with what it says when it is done. If it raises, the other ranks exit
    without a word: the first tells why."""
    failed: Exception | None = None
    said = ""
    if world.rank == 0:
        try:
            said = work()
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            failed = error
    heard = world.hear_first("failed" if failed is not None else f"ready {said}")
    if failed is not None:
        raise failed
    if heard == "failed":
        raise SystemExit(ShoalError.exit_code)
    return heard.removeprefix("ready ")


@contextmanager
def _ending_well(config: Config) -> Iterator[None]:
    """Make a signal that ends the run one message, and say with it, or with a failure, how the run goes on."""

    def stop(number: int, _: object) -> NoReturn:
        error = Stopped(f"stopped by {signal.Signals(number).name}")
        error.exit_code = 128 + number
        raise error

    heeded = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    except (RankFailed, Stopped) as error:
        found = checkpoint.latest(run_folder(config))
        start = f"goes on from {found}" if found else "starts again, for nothing was saved yet"
        error.add_note(f"The same command {start}.")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cpus() -> int:
    """How many this process may use, which under a cluster's scheduler is not how many the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _whole(variable: str) -> int:
    try:
        return int(os.environ[variable])
    except ValueError:
        legal = "check the launcher, or unset it"
        raise ConfigError(setting(variable, os.environ[variable], "not a whole number", legal)) from None
