"""Layouts: how the work is spread over ranks, read from one line and validated before anything starts."""

from __future__ import annotations

from shoal.layout.layout import BUILT, Layout, ModelShape, Offload

__all__ = ["BUILT", "Layout", "ModelShape", "Offload"]
