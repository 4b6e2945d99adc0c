"""What every section of a run file is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1, strict=True)]
Interval = Annotated[int, Field(ge=0, strict=True)]


class Section(BaseModel):
    """Frozen, strict about keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)
