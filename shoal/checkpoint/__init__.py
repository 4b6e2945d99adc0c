"""Checkpoints that know no layout: safetensors boxes and a JSON manifest, saved whole or not at all."""

from __future__ import annotations

from shoal.checkpoint.folder import latest, resolve
from shoal.checkpoint.loading import load, verify
from shoal.checkpoint.manifest import Manifest, read_manifest
from shoal.checkpoint.saving import save

__all__ = ["Manifest", "latest", "load", "read_manifest", "resolve", "save", "verify"]
