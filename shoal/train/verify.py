"""Parity: a layout beside one process, tensor by tensor.

The layout trains a few steps in its own processes; so does :mod:`~shoal.train.reference`, in one. Compared are the
loss, the gradient norm (a wrong count of copies moves the loss by a millionth, the norm by much more), the gradients
before clipping (clipping would hide an error of scale), the weights after each update, and the copies of a tensor that
several ranks hold. Labels are masked unequally between samples, so a mean of means shows.

An asynchronous pipeline computes something else than one process by design: it is held to the recurrence that defines
it (:mod:`~shoal.train.delayed`), at the same tolerance; and parameter servers that are behind, to theirs
(:mod:`~shoal.train.served`). Between two drains ranks have weights of different ages, so weights are compared after
drains: one in the middle, from which the stream begins anew, and the last.

Full tensors are assembled from the boxes that the ranks hold into NaN, so a box that nobody holds shows too.

The one process computes in float64. A layout in float32 differs from it by rounding, which an optimizer that divides by
the size of a gradient (AdamW), or takes its sign (Lion), makes larger: the last digits of a gradient near zero decide
about a whole step of that weight, and later gradients show it. How much that comes to is measured, not guessed: one
process trains in float32 as well, and after each step a layout may be :data:`TIMES` as far from float64 as that one is
in the tensor in which it is furthest. Before the first update nothing is amplified, so there the bound is
:data:`TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.build import stages_of
from shoal.comm.world import World
from shoal.config import Config
from shoal.data.batches import Batch, mask_labels
from shoal.errors import LayoutError, setting
from shoal.layout import Layout
from shoal.layout.text import value_text
from shoal.model.decoder import Decoder
from shoal.placement import Box, Fragment, assemble
from shoal.train.delayed import pipedream, two_bw
from shoal.train.pool import Pool
from shoal.train.reference import PlainTrainer
from shoal.train.served import ServedTrainer
from shoal.train.setup import fit, learning_rate, make_engine, make_model, materialise_alone, open_data
from shoal.train.temporary import temporary_folder

STEPS = 5
_ROUNDED = "rounded"
DRAIN_AFTER = 3
"""Steps of an asynchronous layout before it is drained in the middle."""
TOLERANCE = {"float64": 1e-9, "float32": 2e-5}
"""Largest relative differences, were nothing amplified. In half precision rounding is larger than what a fault does, so
nothing is proved."""
TIMES = 4
"""By how much the rounding of a layout may exceed that of one process: each is a chance of its own."""


@dataclass
class Report:
    """What was compared and how far apart it was, worst step each: the one that leaves least of what is allowed.

    ``max_rel`` has loss, grad_norm, grad (unless the layout is asynchronous) and weight, and ``allowed`` how large
    each may be; ``drift`` is the largest difference between copies. ``worst`` maps "gradient NAME" and "weight NAME" to
    the relative difference of that tensor, and ``limits`` to how large it may be. ``rounding`` is, in float32, how far
    one process was from float64 itself. ``truth`` says in words what the layout was compared with, and ``faults`` what
    disagrees; the layout agrees when there is none.
    """

    layout: str
    steps: int
    tolerance: float
    max_rel: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    rounding: float | None = None
    drift: float = 0.0
    worst: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    truth: str = "one process"

    @property
    def agree(self) -> bool:
        return not self.faults

    def as_json(self) -> dict[str, object]:
        return {
            "agree": self.agree,
            "layout": self.layout,
            "compared_with": self.truth,
            "steps": self.steps,
            "tolerance": self.tolerance,
            "max_rel": self.max_rel,
            "allowed": self.allowed,
            "rounding": self.rounding,
            "drift": self.drift,
            "faults": self.faults,
        }


@dataclass(frozen=True)
class _Scalars:
    loss: float
    grad_norm: float


def verify(config: Config, layout: Layout, pool: Pool, steps: int = STEPS) -> Report:
    """Run ``layout`` (with its world filled in) beside one process for ``steps`` steps, and compare.

    ``pool`` has at least as many processes as the layout has ranks. Raises :class:`~shoal.errors.LayoutError` for a
    layout that does not fit the run file.
    """
    layout = fit(config, layout, layout.ranks)
    if layout.dtype not in TOLERANCE:
        problem = "rounding would hide what verify is to find"
        raise LayoutError(setting("layout.dtype", layout.dtype, problem, "use dtype=float64 or dtype=float32"))
    if layout.int8_gather or layout.int8_reduce:
        exact = replace(layout, int8_gather=False, int8_reduce=False)
        problem = "what int8 blocks round away would hide what verify is to find"
        legal = f"verify the same without, zero={value_text(exact, 'zero')}: it differs by that rounding alone"
        raise LayoutError(setting("layout.zero", value_text(layout, "zero"), problem, legal))
    with temporary_folder("verify") as folder:
        exact = replace(layout, dtype="float64")
        (truth,) = pool.run(run_reference, config, exact, steps, folder, ranks=1)
        if layout != exact:
            pool.run(run_reference, config, layout, steps, folder, _ROUNDED, ranks=1)
        found = pool.run(run_layout, config, layout, steps, folder, ranks=layout.ranks)
        return _compare(layout, steps, folder, truth, found)


def run_reference(
    world: World, config: Config, layout: Layout, steps: int, folder: Path, name: str = "truth"
) -> list[_Scalars]:
    """Train in one process; leave every gradient and weight of the steps that are compared in ``folder``, under
    ``name``."""
    model = make_model(config, layout)
    parameters = {one.name: one for one in materialise_alone(model, config.run.seed)}
    trainer = _trainer(config, layout, model)
    source, scalars = open_data(config), []
    for step in range(steps):
        result = trainer.step(_masked(source.batch(step), config))
        scalars.append(_Scalars(result.loss, result.grad_norm))
        if step in _compared(layout, steps):
            trainer.drain()
            fragments = [h for name, g in result.gradients.items() for h in parameters[name].fragments("gradient", g)]
            fragments += [h for name, w in result.weights.items() for h in parameters[name].fragments("weight", w)]
            _write(folder / f"{name}-{step}", fragments)
    return scalars


def _trainer(config: Config, layout: Layout, model: Decoder) -> PlainTrainer:
    """What computes in one process what ``layout`` is to compute."""
    common = model, config.optimizer, learning_rate(config), config.run.seed
    if layout.stale or layout.reduce != "mean":
        return ServedTrainer(*common, layout.stale, layout.reduce, layout.dp)
    if not layout.asynchronous:
        return PlainTrainer(*common)
    if layout.schedule == "2bw":
        return two_bw(*common)
    layers = model.layers()
    stage_of = {
        f"{layers[unit][0]}.{name}": stage
        for stage, units in enumerate(stages_of(layout, layers, model.roles))
        for unit in units
        for name, _ in layers[unit][1].named_parameters()
    }
    return pipedream(*common, stage_of, layout.mb, layout.dp, vertical=layout.schedule == "pipedream-vertical")


def _compared(layout: Layout, steps: int) -> set[int]:
    """The steps after which tensors are compared: all, or those before a drain."""
    return {min(DRAIN_AFTER, steps) - 1, steps - 1} if layout.delayed else set(range(steps))


def run_layout(world: World, config: Config, layout: Layout, steps: int, folder: Path) -> list[_Scalars]:
    """Train under ``layout``; leave what this rank holds of every gradient and weight of the steps that are compared
    in ``folder``."""
    engine = make_engine(config, layout, world)
    engine.overlap = True  # as in a run
    source, results = open_data(config), []
    gradients: list[Fragment] = []

    def keep_gradients() -> None:
        gradients[:] = [Fragment(h.kind, h.piece, h.copies, h.tensor.clone()) for h in engine.gradients()]

    engine.on_gradients = keep_gradients
    for step in range(steps):
        part, parts = engine.mesh.coords["dp"], engine.layout.dp
        engine.step(_masked(source.batch(step, part, parts), config))
        if step in _compared(layout, steps):
            engine.drain()
            weights = [fragment for fragment in engine.fragments() if fragment.kind == "weight"]
            _write(folder / f"rank{world.rank}-{step}", gradients + weights)
        results += engine.finished()
    assert [result.step for result in results] == list(range(1, steps + 1))
    return [_Scalars(result.loss, result.grad_norm) for result in results]


def _masked(batch: Batch, config: Config) -> Batch:
    return mask_labels(batch, config.run.seed)


def _compare(layout: Layout, steps: int, folder: Path, truth: list[_Scalars], found: list[list[_Scalars]]) -> Report:
    report = Report(str(layout), steps, TOLERANCE[layout.dtype])
    report.truth = _truth(layout) + " in float64" * (layout.dtype != "float64")
    for key in ("loss", "grad_norm"):
        report.allowed[key] = report.tolerance
        report.max_rel[key] = _worst(
            abs(getattr(ours[step], key) - getattr(truth[step], key)) / max(abs(getattr(truth[step], key)), 1e-300)
            for ours in found
            for step in range(steps)
        )
        if not report.max_rel[key] <= report.tolerance:
            report.faults.append(f"{key} differs by {report.max_rel[key]:.2e} (relative)")
    for step in sorted(_compared(layout, steps)):
        _compare_tensors(report, folder, step)
    for kind, key in (("gradient", "grad"), ("weight", "weight"))[layout.delayed :]:
        names = (name for name in report.worst if name.startswith(kind))
        worst = max(names, key=lambda name: _excess(report.worst[name], report.limits[name]))
        report.max_rel[key], report.allowed[key] = report.worst[worst], report.limits[worst]
    for name, rel in sorted(report.worst.items(), key=lambda item: (isfinite(item[1]), -item[1])):
        if not rel <= report.limits[name]:
            missing = "" if isfinite(rel) else ": some of it is held by no rank, or is not finite"
            report.faults.append(f"{name} differs by {rel:.2e} (relative){missing}")
    return report


def _truth(layout: Layout) -> str:
    if layout.asynchronous:
        return f"one process with gradients as old as those of {layout.schedule}"
    ages = f" with gradients {layout.stale} step{'s' * (layout.stale > 1)} old" if layout.stale else ""
    joined = {
        "mean": "",
        "sum": " that adds up the gradients of replicas",
        "max": " that takes their largest gradients",
    }
    return f"one process{ages}{joined[layout.reduce]}"


def _compare_tensors(report: Report, folder: Path, step: int) -> None:
    """Compare every tensor of one step, one at a time in memory."""
    truth = _read(folder / f"truth-{step}")
    files = [safe_open(path, "pt") for path in sorted(folder.glob(f"rank*-{step}"), key=_rank)]
    rms = {kind: _rms(t for name, t in truth.items() if name.startswith(kind)) for kind in ("gradient", "weight")}
    limits = dict.fromkeys(rms, report.tolerance)
    if (rounded := folder / f"{_ROUNDED}-{step}").exists():
        for key, tensor in _read(rounded).items():
            kind = key.split()[0]
            rel = _relative(tensor, truth[key], rms[kind])
            report.rounding = _worst((rel, report.rounding or 0.0))
            limits[kind] = max(limits[kind], TIMES * rel)
    boxes: dict[str, list[tuple[int, str]]] = {}
    for rank, file in enumerate(files):
        for key in file.keys():  # noqa: SIM118
            boxes.setdefault(key.rpartition("@")[0], []).append((rank, key))
    for key, expected in truth.items():
        name, _, _ = key.rpartition("@")
        kind, held = name.split()[0], dict[Box, Tensor]()
        for rank, where in boxes.get(name, []):
            box, tensor = _box(where), files[rank].get_tensor(where)
            if (other := held.setdefault(box, tensor)) is not tensor:
                _note_drift(report, name, rank, _relative(tensor, other, rms[kind]))
        full = assemble(expected.shape, list(held.items())) if held else torch.full_like(expected, float("nan"))
        rel = _relative(full, expected, rms[kind])
        if name not in report.worst or _excess(rel, limits[kind]) > _excess(report.worst[name], report.limits[name]):
            report.worst[name], report.limits[name] = rel, limits[kind]


def _excess(rel: float, limit: float) -> float:
    """How much of what is allowed a difference takes; one that is not a number more than all."""
    return rel / limit if isfinite(rel) else inf


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _note_drift(report: Report, name: str, rank: int, drift: float) -> None:
    report.drift = _worst((report.drift, drift))
    if not drift <= report.tolerance and not any(name in fault for fault in report.faults):
        report.faults.append(f"{name} is not the same on rank {rank} as on the first rank that holds it: {drift:.2e}")


def _relative(a: Tensor, b: Tensor, rms: float) -> float:
    """‖a − b‖ / max(‖b‖, rms·√n): the floor keeps gradients that are zero in exact arithmetic from being noise over
    noise."""
    difference = (a - b).double().norm().item()
    return float(difference / max(b.double().norm().item(), rms * b.numel() ** 0.5, 1e-300))


def _rms(tensors: Iterable[Tensor]) -> float:
    squares, count = 0.0, 0
    for tensor in tensors:
        squares += tensor.double().square().sum().item()
        count += tensor.numel()
    return float((squares / max(count, 1)) ** 0.5)


def _worst(values: Iterable[float]) -> float:
    """The largest, or NaN if any is NaN."""
    known = list(values)
    return next((value for value in known if value != value), max(known, default=0.0))


def _write(path: Path, fragments: Iterable[Fragment]) -> None:
    """One file of this rank's boxes: "kind name@start:stop,…" → contents."""
    tensors = {}
    for one in fragments:
        box = ",".join(f"{start}:{stop}" for start, stop in one.piece.box)
        tensors[f"{one.kind} {one.piece.name}@{box}"] = one.tensor.detach().cpu().contiguous().clone()
    save_file(tensors, path)


def _rank(path: Path) -> int:
    return int(path.name.removeprefix("rank").partition("-")[0])


def _box(key: str) -> Box:
    text = key.rpartition("@")[2]
    spans = [span.split(":") for span in text.split(",")] if text else []
    return tuple((int(start), int(stop)) for start, stop in spans)
