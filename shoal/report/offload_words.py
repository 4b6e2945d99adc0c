"""What lives away from the device, in words."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.layout import Layout, Offload
from shoal.layout.kinds import HALVES

_WHAT = {
    "optimizer": "masters and optimizer states",
    "params": "parameters",
    "grads": "sums of gradients",
    "activations": "what layers keep for the backward pass",
}
_WHERE = {"cpu": "in the host's memory", "nvme": "in a file of this rank on the machine's disk"}


def offload_meaning(layout: Layout) -> Iterator[tuple[str, str, str]]:
    """(key, what it does, what it costs) of each thing that is away."""
    for part in layout.offload:
        share = "" if part.fraction == 1 else f"{part.fraction:.3g} of "
        yield f"offload={part}", f"{share}{_WHAT[part.what]} {_WHERE[part.where]}", _cost(layout, part)


def _cost(layout: Layout, part: Offload) -> str:
    visits = "in a step" if layout.stages > 1 or layout.keep_params else "for each micro-batch"
    match part.what:
        case "optimizer":
            passes = ", through which they pass once a step, there and back" if part.where == "nvme" else ""
            return f"the update runs on the host{passes}; gradients go there, and new parameters come back"
        case "params":
            return f"those of a layer come for its forward and its backward pass {visits}, the next layer's meanwhile"
        case "grads":
            half = layout.dtype in HALVES and layout.half_grads
            return f"a bucket's go there when it is complete, in {layout.dtype if half else 'full precision'}"
        case _:
            return "a layer's go while the next ones run, and come back before its backward pass"
