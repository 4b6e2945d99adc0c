from __future__ import annotations

import pytest
from families import FAMILIES, shape_of
from torch import nn

from shoal.config import Model
from shoal.model.decoder import Decoder
from shoal.model.norms import NORMS
from shoal.model.roles import REPLICATED, Role, logical_parts, role_of

TABLE = {"blocks.*.attn": Role("qkv"), "blocks.1.attn": Role("latent"), "*": Role("head"), "": Role("loss")}


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("blocks.0.attn", "qkv"),
        ("blocks.17.attn", "qkv"),
        ("blocks.1.attn", "latent"),
        ("out", "head"),
        ("", "loss"),
        ("blocks.0.x.attn", "replicated"),
        ("blocks.attn", "replicated"),
        ("my.blocks.0.attn", "replicated"),
        ("blocks.0.attn.core", "replicated"),
    ],
)
def test_a_star_is_one_component_and_an_exact_name_goes_first(module: str, kind: str) -> None:
    assert role_of(TABLE, module).kind == kind


def test_a_fused_parameters_parts_stand_beside_its_module() -> None:
    role = Role("qkv", parts=(("q", 8), ("k", 4)))
    assert logical_parts(role, "blocks.0.attn.qkv", "weight") == (
        ("blocks.0.attn.q.weight", 8),
        ("blocks.0.attn.k.weight", 4),
    )
    assert logical_parts(role, "qkv", "bias") == (("q.bias", 8), ("k.bias", 4))
    assert logical_parts(Role("norm"), "a.norm", "weight") == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_with_parameters_of_the_decoder_has_a_role_that_fits_it(family: str) -> None:
    model, norms = Decoder(shape_of(family)), tuple(NORMS.values())
    for name, module in model.named_modules():
        role = role_of(model.roles, name)
        if own := dict(module.named_parameters(recurse=False)):
            assert role is not REPLICATED, name
            assert ("norm" in role.kind) == isinstance(module, norms), name
            assert (role.kind in ("embed", "position")) == isinstance(module, nn.Embedding), name
            for parameter in own:
                if parts := logical_parts(role, name, parameter):
                    assert sum(rows for _, rows in parts) == len(own[parameter])


def test_matrices_that_write_to_the_residual_start_smaller() -> None:
    model = Decoder(Model(layers=2, hidden=8, heads=4, kv_heads=2, ffn=6, vocab=10))
    assert {role_of(model.roles, f"blocks.1.{leaf}").std for leaf in ("attn.out", "ffn.down")} == {0.01}
    assert role_of(model.roles, "blocks.1.attn.qkv").std == role_of(model.roles, "embed").std == 0.02
