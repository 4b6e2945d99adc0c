"""What the framework decides, beside the layout: which kernels it has, what it keeps and adds up, what it overlaps.

The constants of the time model depend on the hardware and on these, and on nothing else. They ship in
``constants.json``, with how they were fitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Profile:
    """A framework, as far as time and memory depend on it."""

    name: str
    attention: str = "flash2"
    """unfused, fused-softmax, flash1, flash2 or cudnn."""
    kernels: str = "fused"
    """How much element-wise work is fused: eager (nothing, and norms in float32), torch (nothing), fused (norms,
    activations and bias, by hand), compiled."""
    host: str = "eager"
    """What launches kernels: eager, or graph where that costs nothing."""
    gradient_bytes: int = 4
    """Of a parameter's gradient where micro-batches add up."""
    reduce_bytes: int = 4
    """Likewise while replicas add them up."""
    state_bytes: int = 12
    """Of a parameter in the optimizer: float32 copy and two moments."""
    kept_copies: float = 1.0
    """How often what is between a layer's matrices is kept for its backward pass."""
    score_bytes: int = 0
    """Of attention's scores, where they are kept; 0 for the 16-bit softmax alone, and dropout's part."""
    logit_bytes: int = 12
    """Of a logit, the most at one moment: its 16-bit value, float32 copies and the gradient."""
    splits_logits: bool = True
    """Whether tensor parallelism divides the loss, or gathers logits whole first."""
    hides_data: bool = True
    """Whether reductions and gathers of data parallelism run beside compute."""
    hides_tensor: bool = False
    """Whether tensor parallelism's do."""
    hides_experts: bool = False
    workspace_gib: float = 0.1
    """Of its libraries' matrix products, within what the allocator counts."""
    first_memory_gib: float = 2.0
    """What contexts, communicators and workspaces take before the model is there."""


PROFILES = {
    one.name: one
    for one in (
        Profile("shoal", attention="flash2", kernels="torch", gradient_bytes=4, reduce_bytes=4, logit_bytes=12),
        Profile("megatron-2021", attention="fused-softmax", hides_data=False, reduce_bytes=2, gradient_bytes=2),
        Profile("megatron-2022", attention="fused-softmax", hides_data=False),
        Profile("megatron-deepspeed", attention="fused-softmax", hides_data=False, gradient_bytes=4),
        Profile("megatron", attention="cudnn"),
        *(
            Profile(
                f"scaling-{name}",
                attention=attention,
                kernels=kernels,
                gradient_bytes=2,
                score_bytes=5,
                kept_copies=2.0,
                logit_bytes=24,
                splits_logits=False,
                hides_data=False,
            )
            for name, attention, kernels in (
                ("torch", "unfused", "eager"),
                ("fused", "fused-softmax", "eager"),
                ("flash1", "flash1", "eager"),
                ("flash2", "flash2", "eager"),
                ("flash2-norm", "flash2", "fused"),
            )
        ),
        Profile("composer", attention="flash1", kernels="torch", gradient_bytes=2, reduce_bytes=2),
        Profile("internevo", attention="flash2", kernels="fused", gradient_bytes=2, reduce_bytes=2),
        Profile("nemo", attention="cudnn", kernels="fused", hides_tensor=True, reduce_bytes=2),
        Profile("bridge-2602", attention="cudnn", hides_tensor=True, hides_experts=True, reduce_bytes=2),
        Profile("bridge", attention="cudnn", host="graph", hides_tensor=True, hides_experts=True, reduce_bytes=2),
        Profile("torchtitan", attention="flash2", kernels="torch", gradient_bytes=4),
        Profile("torchtitan-compiled", attention="flash2", kernels="compiled", gradient_bytes=4),
        Profile("fsdp-compiled", attention="flash2", kernels="compiled", gradient_bytes=4, reduce_bytes=2),
        Profile("deepspeed", attention="unfused", kernels="torch", gradient_bytes=2, reduce_bytes=2),
    )
}

Constants = Mapping[str, float]


@cache
def _shipped() -> dict[str, Any]:
    text = files("shoal.plan").joinpath("constants.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def constants() -> Constants:
    """The constants of the time model that ship with Shoal, by name."""
    values: dict[str, float] = _shipped()["values"]
    return values


def errors() -> Mapping[str, float]:
    """How far those predictions were off that the constants were not fitted to: relative, by name of a statistic."""
    values: dict[str, float] = _shipped()["errors"]
    return values
