"""config.json ↔ the model section of a run file, for every family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shoal.config import Model
from shoal.errors import ConfigError, setting
from shoal.model.hf.experts import KEYS as EXPERT_KEYS
from shoal.model.hf.experts import read_experts, same_experts, written_experts
from shoal.model.hf.families import FAMILIES, Family, family_of
from shoal.model.hf.latent import read_latent, written_latent
from shoal.model.hf.rotary import read_rope, written_rope

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
}
_WRITTEN = {"silu": "silu", "gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh"}

# Keys that change what a model computes in a way the decoder cannot, with the values that do not.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "clip_qkv": (None,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "add_cross_attention": (None, False),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
}
_TRAINING = {"dropout", "z_loss", "balance_loss", "gate_z_loss", "bias_rate"}
"""Settings of the model section that say how it is trained, of which config.json knows nothing that would do."""


def read_model(config: Mapping[str, Any]) -> Model:
    """The model section for a config.json: what the model computes; dropout is left at zero.

    Raises :class:`ConfigError` for an unknown architecture, an option that the decoder does not have, a missing key,
    or sizes that cannot be.
    """
    family = family_of(config)
    try:
        _refuse(config, family)
        values = _values(config, family)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"config.json: a value of the wrong type: {error}") from None
    try:
        return Model.model_validate({field: value for field, value in values.items() if value is not None})
    except ValidationError as error:
        fault = error.errors()[0]
        if fault["type"] == "value_error":
            raise ConfigError(f"config.json: {fault['ctx']['error']}") from None
        key = ".".join(str(family.keys.get(str(part), part)) for part in fault["loc"])
        raise ConfigError(f"config.json: {key} = {fault['input']}: {fault['msg'].lower()}") from None


def _values(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The settings of the model section, None where they are left to it."""
    values = dict(family.fixed) | {field: _value(config, family, key) for field, key in family.keys.items()}
    values["activation"] = _read_activation(family, values["activation"])
    if family.name == "gpt2" and values["ffn"] is None:
        values["ffn"] = 4 * values["hidden"]
    if family.name in ("qwen2", "qwen3"):
        values["window"] = _read_window(config)
    if family.name == "qwen3_moe" and config.get("use_sliding_window"):
        values["window"] = config.get("sliding_window", 4096)
    if "positions" not in family.fixed:
        values |= read_rope(config, family.defaults.get("rope_theta", 10_000.0))
    if "experts" in family.keys:
        values = read_experts(config, family.name, values)
    return values | (read_latent(config) if family.latent else {})


def write_config(shape: Model, base: Mapping[str, Any] | None = None, *, positions: int = 2048) -> dict[str, Any]:
    """A config.json for a model: of the family of ``base``, whose other keys stay, or of the first that can say it.

    ``positions`` is what ``max_position_embeddings`` becomes where nothing else tells. Raises :class:`ConfigError`
    where no family has such a model.
    """
    base = base or {}
    for family in sorted(FAMILIES.values(), key=lambda one: one.name != base.get("model_type")):
        spelled_otherwise = {"rope_parameters", *family.spelled.values()}
        kept = {key: value for key, value in base.items() if key not in spelled_otherwise}
        config = {
            "architectures": [family.architecture],
            "model_type": family.name,
            **({} if "max_positions" in family.keys else {"max_position_embeddings": positions}),
            **(kept if base.get("model_type") in (None, family.name) else {}),
            **_written(shape, family),
        }
        try:
            said = read_model(config)
        except ConfigError:  # nothing of this family
            continue
        if _computes(said) == _computes(shape):
            return config
    raise ConfigError(
        "model: no family of Hugging Face models has this combination of norms, positions, biases and feed-forward; "
        f"the families are {', '.join(FAMILIES)}"
    )


def _written(shape: Model, family: Family) -> dict[str, Any]:
    values = {key: getattr(shape, field) for field, key in family.keys.items() if field not in EXPERT_KEYS}
    activation = _WRITTEN[shape.activation]
    if family.name == "gpt2":
        return values | {"activation_function": "gelu_new" if shape.activation == "gelu-tanh" else activation}
    values["hidden_act"] = activation
    if family.name == "gemma":
        values["hidden_activation"] = activation
    if family.name in ("qwen2", "qwen3"):
        values |= _written_window(shape)
    if family.name == "qwen3_moe":
        values |= {"use_sliding_window": shape.window is not None, "sliding_window": shape.window}
    if "experts" in family.keys:
        values |= written_experts(shape, family.name, family.keys)
    return values | written_rope(shape) | (written_latent(shape) if family.latent else {})


def _computes(shape: Model) -> Model:
    """The model without the settings that change nothing of what it computes."""
    update: dict[str, Any] = dict.fromkeys(_TRAINING, 0.0)
    if shape.positions == "rope":
        update["max_positions"] = 1
    return shape.model_copy(update=update | same_experts(shape))


def _refuse(config: Mapping[str, Any], family: Family) -> None:
    for key, fine in {**_ONLY, **family.only}.items():
        if config.get(key) not in fine:
            only = " or ".join(str(value) for value in fine if value is not None) or "absent"
            raise ConfigError(setting(key, config[key], "not an option of Shoal's decoder", f"it must be {only}"))
    if len(kinds := set(config.get("layer_types") or [])) > 1:
        raise ConfigError(
            setting("layer_types", sorted(kinds), "layers of several kinds are not built", "all must be of one kind")
        )


def _value(config: Mapping[str, Any], family: Family, key: str) -> Any:
    for spelling in (key, family.spelled.get(key, key)):
        if (value := config.get(spelling)) is not None:
            return value
    if key not in family.defaults:
        raise ConfigError(f"config.json: {key} is missing; a {family.name} model needs it")
    # A key that is null is what the file says, where null means something: no window.
    return None if key in config else family.defaults[key]


def _read_activation(family: Family, name: str) -> str:
    if name not in _ACTIVATIONS:
        key = family.keys["activation"]
        raise ConfigError(setting(key, name, "not an activation of Shoal", f"one of {', '.join(_ACTIVATIONS)}"))
    # Gemma's first files say gelu and were trained with the approximation, which is what everybody computes.
    return "gelu-tanh" if family.name == "gemma" and name == "gelu" else _ACTIVATIONS[name]


def _read_window(config: Mapping[str, Any]) -> Any:
    """Qwen: the last layers may have a window and the first none; here all must be alike."""
    if not config.get("use_sliding_window"):
        return None
    kinds = set(config.get("layer_types") or [])
    first, layers = config.get("max_window_layers", 28), config["num_hidden_layers"]
    if kinds == {"full_attention"} or (not kinds and first >= layers):
        return None
    if not kinds and first > 0:
        problem = f"{first} of {layers} layers without a window are not built"
        raise ConfigError(setting("max_window_layers", first, problem, f"0, or {layers} and more"))
    return config.get("sliding_window", 4096)


def _written_window(shape: Model) -> dict[str, Any]:
    kind = "full_attention" if shape.window is None else "sliding_attention"
    return {
        "use_sliding_window": shape.window is not None,
        "sliding_window": shape.window,
        "max_window_layers": shape.layers if shape.window is None else 0,
        "layer_types": [kind] * shape.layers,
    }
