"""The model that a layout is shown on when nobody names one."""

from __future__ import annotations

from shoal import config
from shoal.config import Config
from shoal.layout import Layout

MODEL = {"layers": 8, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 160, "vocab": 512}


def example(layout: Layout) -> Config:
    """A run of a small decoder, with a batch that ``layout`` divides."""
    samples = max(layout.dp, 1) * layout.mb
    data = {"source": "synthetic", "seq_len": 32, "batch": samples}
    return config.parse({"run": {"name": "example", "steps": 1}, "model": MODEL, "data": data})
