"""The Hugging Face format of the families that Shoal's decoder can be: sizes, names, files."""

from __future__ import annotations

from shoal.model.hf.config import read_model, write_config
from shoal.model.hf.families import FAMILIES, Family, family_of
from shoal.model.hf.files import (
    COMPANIONS,
    CONFIG,
    GENERATION,
    INDEX,
    TOKENIZER_CONFIG,
    WEIGHTS,
    end_tokens,
    inside,
    is_folder,
    read_json,
)
from shoal.model.hf.names import Stored, logical_shapes, stored_tensors
from shoal.model.hf.weights import Weights

__all__ = [
    "COMPANIONS",
    "CONFIG",
    "FAMILIES",
    "GENERATION",
    "INDEX",
    "TOKENIZER_CONFIG",
    "WEIGHTS",
    "Family",
    "Stored",
    "Weights",
    "end_tokens",
    "family_of",
    "inside",
    "is_folder",
    "logical_shapes",
    "read_json",
    "read_model",
    "stored_tensors",
    "write_config",
]
