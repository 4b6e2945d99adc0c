"""What attention has that takes several numbers: the scaling of rotary angles, and latents."""

from __future__ import annotations

import json
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from shoal.config.section import Count, Section
from shoal.errors import setting


class RopeScaling(Section):
    """How rotary angles are stretched beyond the length they were trained for."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float = Field(gt=1)
    low_freq_factor: float = Field(1.0, gt=0, description="llama3")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3")
    original_positions: Count = Field(8192, description="llama3, yarn: the length before stretching")
    beta_fast: float = Field(32.0, gt=0, description="yarn: what turns so often in the original length stays")
    beta_slow: float = Field(1.0, gt=0, description="yarn: what turns no more often is stretched by all of factor")
    mscale: float = Field(1.0, gt=0, description="yarn: cosine and sine grow by 0.1·mscale·ln(factor) + 1")
    mscale_all_dim: float = Field(
        0.0, ge=0, description="yarn: and shrink by as much of this; scores of latent attention grow by its square"
    )

    @model_validator(mode="after")
    def _suits_its_kind(self) -> RopeScaling:
        for least, most in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            low, high = getattr(self, least), getattr(self, most)
            if high <= low and self.kind == _KIND_OF[most]:
                raise ValueError(setting(most, high, f"must be more than {least} ({low})", f"use {4 * low}"))
        for name, kind in _KIND_OF.items():
            if kind != self.kind and getattr(self, name) != (unset := type(self).model_fields[name].default):
                problem = f"{self.kind} scaling has no such number"
                raise ValueError(
                    setting(name, getattr(self, name), problem, f'leave it {unset}, or use kind = "{kind}"')
                )
        if self.kind == "linear" and self.original_positions != 8192:
            problem = "linear scaling stretches all angles alike"
            raise ValueError(
                setting("original_positions", self.original_positions, problem, 'leave it 8192, or use kind = "llama3"')
            )
        return self


_KIND_OF = {
    "low_freq_factor": "llama3",
    "high_freq_factor": "llama3",
    "beta_fast": "yarn",
    "beta_slow": "yarn",
    "mscale": "yarn",
    "mscale_all_dim": "yarn",
}


class Latent(Section):
    """Multi-head latent attention (DeepSeek-V2, 2024): the keys and values of all heads come from one narrow latent."""

    rank: Count = Field(description="width of the latent of keys and values")
    query_rank: Count | None = Field(
        None, description="width of the latent of queries; unset: queries come from the stream"
    )
    plain_dim: Count = Field(description="features of a head's queries and keys that do not turn with the position")
    turned_dim: Count = Field(description="features that do; the keys' are one set for all heads")
    value_dim: Count = Field(description="features of a head's values")

    @model_validator(mode="after")
    def _turns_pairs(self) -> Latent:
        if self.turned_dim % 2:
            raise ValueError(setting("turned_dim", self.turned_dim, "must be even", f"use {self.turned_dim + 1}"))
        return self


class WithAttention(Protocol):
    """The settings of a model that :func:`check_attention` looks at; see :class:`shoal.config.Model`."""

    @property
    def heads(self) -> int: ...
    @property
    def latent(self) -> Latent | None: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def qk_norm_over(self) -> str: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> RopeScaling | None: ...


def check_attention(model: WithAttention) -> None:
    """Raise :class:`ValueError` for what does not go together."""
    scaling, theta = model.rope_scaling, model.rope_theta
    if scaling is not None and scaling.kind == "yarn" and theta <= 1:
        raise ValueError(setting("rope_theta", theta, "yarn needs a base above 1", "use 10000"))
    if model.qk_norm_over != "head" and not model.qk_norm:
        problem = "there are no norms of queries and keys"
        raise ValueError(setting("qk_norm_over", model.qk_norm_over, problem, "use qk_norm = true"))
    if model.latent is None:
        return
    heads: dict[str, Any] = {
        "kv_heads": model.heads,
        "head_dim": model.latent.plain_dim + model.latent.turned_dim,
        "qk_norm": False,
        "positions": "rope",
    }
    for name, value in heads.items():
        if (found := getattr(model, name)) != value:
            legal = f"leave it out, or use {json.dumps(value)}"
            raise ValueError(setting(name, found, "not with latent attention", legal))
