"""The machine that a command runs on, as it was measured: where the result is kept, and what was measured for it."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError, setting

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.layout import Layout
    from shoal.plan.hardware import Cluster
    from shoal.plan.here import Here
    from shoal.train.calibrate import Progress

NAME = "here"
"""What it is called among clusters."""
_MODELS = {
    "wide": {"layers": 3, "hidden": 256, "heads": 8, "ffn": 704, "vocab": 1024},
    "narrow": {"layers": 8, "hidden": 128, "heads": 4, "ffn": 352, "vocab": 2048},
}
_STEPS = (
    ("wide", 128, 8, "dp=1"),
    ("wide", 128, 8, "mb=4"),
    ("wide", 128, 8, "mb=2,recompute=full"),
    ("narrow", 64, 16, "dp=1"),
    ("narrow", 64, 16, "mb=8"),
    ("narrow", 512, 2, "dp=1"),
    ("wide", 128, 8, "dp=2"),
    ("narrow", 64, 16, "dp=2,zero=1,mb=2"),
    ("wide", 128, 8, "dp=2,zero=3"),
    ("wide", 128, 8, "tp=2"),
    ("narrow", 64, 16, "tp=2:1d-sp,mb=2"),
    ("narrow", 256, 4, "cp=2,mb=2"),
    ("narrow", 64, 16, "pp=2,mb=4"),
    ("wide", 128, 8, "dp=4"),
    ("narrow", 64, 16, "tp=4"),
    ("narrow", 64, 16, "pp=4,mb=8"),
    ("narrow", 64, 16, "dp=2,tp=2,mb=2"),
)
"""Small models, positions and samples of a step, and layouts, that show what operations alone do not."""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float:
    """Of the machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def stamp() -> str:
    """The hardware and the libraries, in words: what is measured holds for these."""
    from importlib.metadata import version

    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        processor = next(line for line in text.splitlines() if line.startswith("model name")).partition(":")[2].strip()
    return f"{processor}, {cores()} cores, {memory_gib():.0f} GiB, torch {version('torch')}"


def place() -> Path:
    """Where what was measured of this hardware, with these libraries, is kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "shoal" / f"here-{sha256(stamp().encode()).hexdigest()[:12]}.json"


def known() -> Here | None:
    """What was measured of this machine, if it was."""
    from shoal.plan.here import read

    with suppress(OSError, ValueError, KeyError, TypeError):
        return read(json.loads(place().read_text(encoding="utf-8")))
    return None


def keep(found: Here) -> Path:
    """Write it down, at once or not at all."""
    path = place()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(found.as_json(), indent=1), encoding="utf-8")
    new.replace(path)
    return path


def here_cluster(text: str, dtype: str) -> tuple[Cluster, Here] | None:
    """The cluster ``here`` (as many ranks as cores) or ``4xhere``; None where ``text`` names another. Raises
    :class:`ConfigError` where nothing was measured."""
    count, _, name = text.rpartition("x")
    if name != NAME or (text != NAME and not count.isdigit()):
        return None
    found = known()
    if found is None:
        raise ConfigError(setting("cluster", text, "this machine was not measured yet", "run shoal calibrate first"))
    ranks = int(count) if count else found.cores
    if ranks < 1:
        raise ConfigError(setting("cluster", text, "it has no ranks", "use here, or 2xhere"))
    return found.cluster(ranks, dtype), found


def small_runs() -> list[tuple[Config, Layout]]:
    """The steps that are measured."""
    from shoal.config import Config
    from shoal.layout import Layout
    from shoal.train.setup import fit

    found = []
    for model, positions, samples, line in _STEPS:
        table = {"source": "synthetic", "seq_len": positions, "batch": samples}
        config = Config.model_validate({"run": {"steps": 1}, "model": _MODELS[model], "data": table})
        plan = Layout.parse(line)
        found.append((config, fit(config, plan, plan.ranks)))
    return found


def measured_here(seen: Progress) -> Here:
    """Measure this machine."""
    from shoal.plan import here
    from shoal.plan.hardware import Device
    from shoal.plan.layouts import split_of
    from shoal.plan.shape import of_model
    from shoal.plan.work import Job
    from shoal.train import calibrate

    count = cores()
    found = calibrate.measure(count, small_runs(), seen)
    messages = [
        here.Message(one.kind, one.ranks, amount, seconds)
        for one in found.messages
        for amount, seconds in zip(calibrate.MESSAGES, one.seconds, strict=True)
    ]

    def speeds(device: calibrate.Device) -> here.Speeds:
        return here.Speeds(
            [(*shape, s) for shape, s in zip(calibrate.PRODUCTS, device.products, strict=True)],
            [(*shape, s) for shape, s in zip(calibrate.ATTENTION, device.attention, strict=True)],
            2.0 * calibrate.MOVED,
            device.moved,
            device.started,
        )

    devices: dict[str, dict[int, Device]] = {}
    for (dtype, threads), device in found.devices.items():
        devices.setdefault(dtype, {})[threads] = here.described(dtype, speeds(device), messages, count, threads)
    start = here.first_constants(speeds(found.devices["float32", 1]), messages, count)
    # Ranks of a pool have one thread each, however few they are.
    single = here.Here(stamp(), count, memory_gib(), {"float32": {1: devices["float32"][1]}}, start, 0.0)
    steps = []
    for config, layout, tried in found.steps:
        machines, data = single.cluster(layout.ranks, "float32"), config.data
        job = Job(of_model(config.model), machines, data.seq_len, data.batch, here.profile("float32"), "float32")
        # Of one rank, what it ran, which others at work do not lengthen; of several, the shortest step.
        seconds = min(tried.cpu_s if layout.ranks == 1 else tried.wall_s)
        steps.append(here.Step(job, split_of(layout, job.batch), seconds))
    values, off = here.fitted(steps, start)
    return here.Here(stamp(), count, memory_gib(), devices, values, off)
