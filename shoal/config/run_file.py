"""A run file: one validated value for a whole run, read from TOML with ``--set section.key=value`` on top.

Unknown keys are refused with their nearest match; every error names the setting, its value and what is legal.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError, model_validator

from shoal.config.attention import Latent, RopeScaling, check_attention
from shoal.config.experts import Gating, check_experts
from shoal.config.faults import explain
from shoal.config.section import Count, Fraction, Interval, Section
from shoal.errors import ConfigError, setting
from shoal.layout import Layout


class Model(Section):
    """The sizes and choices of a decoder; unless told otherwise, those of Llama."""

    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count = Field(
        default_factory=lambda known: known.get("heads", 1), description="key/value heads; unset: as many as heads"
    )
    latent: Latent | None = Field(None, description="latent attention (DeepSeek); unset: grouped-query attention")
    head_dim: Count = Field(
        default_factory=lambda known: _head_dim(known), description="size of a head; unset: hidden / heads"
    )
    ffn: Count
    vocab: Count
    tied: bool = Field(False, description="output matrix shared with the input embedding")
    dropout: Fraction = 0.0
    norm: Literal["rms", "rms-plus-one", "layer"] = Field(
        "rms", description="rms-plus-one scales by 1 + weight (Gemma); layer has mean and bias (GPT-2)"
    )
    norm_eps: float = Field(1e-5, gt=0)
    qk_norm: bool = Field(False, description="norms of queries and keys")
    qk_norm_over: Literal["head", "all"] = Field(
        "head", description="qk_norm: of each head by itself (Qwen 3), or of all heads together (OLMoE)"
    )
    positions: Literal["rope", "learned"] = "rope"
    max_positions: Count = Field(1024, description="learned: rows of the table")
    rope_theta: float = Field(10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    window: Count | None = Field(None, description="positions that attention sees, its own included; unset: all")
    activation: Literal["silu", "gelu", "gelu-tanh"] = "silu"
    gated: bool = Field(True, description="feed-forward of two matrices, one gating the other, and a third; or of two")
    qkv_bias: bool = False
    out_bias: bool = Field(False, description="bias after attention")
    ffn_bias: bool = False
    scaled_embedding: bool = Field(False, description="the embedding is multiplied by √hidden (Gemma)")
    z_loss: float = Field(0.0, ge=0, description="weight of log²Σexp(logits) in the loss while training")
    experts: Interval = Field(0, description="feed-forwards of a layer among which a gate chooses; 0: one, for all")
    experts_per_token: Count = Field(2, description="how many of them a token takes")
    expert_ffn: Count | None = Field(None, description="columns of an expert; unset: ffn")
    shared_experts: Interval = Field(0, description="experts, side by side, that every token takes besides")
    dense_layers: Interval = Field(0, description="first layers without experts (DeepSeek)")
    gate: Gating = Field(
        "softmax",
        description="softmax over all experts, then the largest (Qwen 3); topk-softmax over the largest (Mixtral); "
        "sigmoid with a bias that balances (DeepSeek-V3); sinkhorn; expert-choice: experts choose tokens",
    )
    gate_renormalise: bool = Field(False, description="softmax, sigmoid: the weights of a token's experts sum to 1")
    gate_scale: float = Field(1.0, gt=0, description="what these weights are multiplied by")
    gate_groups: Count = Field(1, description="groups of experts side by side")
    gate_top_groups: Count = Field(1, description="groups from which a token's experts come")
    bias_rate: float = Field(1e-3, ge=0, description="sigmoid: step of the bias, towards balance")
    capacity: float | None = Field(
        None,
        gt=0,
        description="tokens of a sequence an expert takes, over an even share; later ones it drops; unset: all",
    )
    balance_loss: float = Field(0.0, ge=0, description="weight of the loss of uneven load, of each sequence")
    gate_z_loss: float = Field(0.0, ge=0, description="weight of log²Σexp(scores) of the gate")

    @model_validator(mode="after")
    def _heads_divide(self) -> Model:
        # Rotary angles turn pairs.
        unit, size = (2, "an even head size") if self.positions == "rope" else (1, "a head size")
        if self.latent is None and "head_dim" not in self.model_fields_set and self.hidden % (unit * self.heads):
            raise ValueError(
                setting("hidden", self.hidden, f"must be heads ({self.heads}) times {size}",
                        f"use {self._near(self.hidden, unit * self.heads)}")
            )  # fmt: skip
        if self.latent is None and self.head_dim % unit:
            raise ValueError(setting("head_dim", self.head_dim, "must be even", f"use {self.head_dim + 1}"))
        if self.heads % self.kv_heads:
            raise ValueError(
                setting("kv_heads", self.kv_heads, f"must divide heads ({self.heads})",
                        f"use one of {[n for n in range(1, self.heads + 1) if self.heads % n == 0]}")
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _positions_are_of_one_kind(self) -> Model:
        if self.positions == "learned":
            for name in ("rope_theta", "rope_scaling"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    shown = value.kind if isinstance(value, RopeScaling) else value
                    legal = 'leave it out, or use positions = "rope"'
                    raise ValueError(setting(name, shown, "learned positions have no rotary angles", legal))
        return self

    @model_validator(mode="after")
    def _attention_goes_together(self) -> Model:
        check_attention(self)
        return self

    @model_validator(mode="after")
    def _experts_go_together(self) -> Model:
        check_experts(self)
        return self

    @property
    def turned_dim(self) -> int:
        """The features of a query or key head that turn with the position."""
        return self.head_dim if self.latent is None else self.latent.turned_dim

    @property
    def expert_width(self) -> int:
        """Columns of one expert."""
        return self.expert_ffn or self.ffn

    @staticmethod
    def _near(value: int, unit: int) -> int:
        return max(unit, round(value / unit) * unit)


def _head_dim(known: Mapping[str, Any]) -> int:
    if (latent := known.get("latent")) is not None:
        return int(latent.plain_dim + latent.turned_dim)
    return int(known.get("hidden", 2) // known.get("heads", 1))


class DataSource(Section):
    """One of several token stores."""

    path: Path = Field(description="token store made by `shoal data`, or Megatron's .bin/.idx")
    weight: float = Field(1.0, gt=0, description="its share of the samples is this over the sum of all weights")


class Data(Section):
    """Where samples come from."""

    source: Literal["tokens", "synthetic"] = Field(
        "tokens", description="a token store, or random tokens that need no file"
    )
    path: Path | None = Field(None, description="token store made by `shoal data`, or Megatron's .bin/.idx")
    text: Path | None = Field(None, description="text or JSONL from which `train` makes the store if it is missing")
    separator: str | None = Field(None, description="what stands between documents in a text file")
    tokenizer_vocab: Count | None = Field(
        None, description="entries of the tokenizer that is trained on the text if the store is missing"
    )
    sources: tuple[DataSource, ...] = Field((), description="several token stores instead of path")
    seq_len: Count
    batch: Count = Field(description="samples in a step, over all ranks")
    batch_ramp: tuple[tuple[Count, Count], ...] = Field(
        (), description="[step, samples]: from that step on (counted from 0) a step has so many"
    )
    validation: Fraction = Field(0.0, description="share of the samples kept for validation, of each source")
    packing: Literal["stream", "documents"] = Field(
        "stream", description="samples are windows over all text, or whole documents side by side with padding"
    )
    documents: bool = Field(
        default_factory=lambda known: known.get("packing") == "documents",
        description='attention and positions stop at document bounds; unset: with packing = "documents"',
    )

    @model_validator(mode="after")
    def _has_path(self) -> Data:
        if self.source == "tokens" and self.path is None and not self.sources:
            raise ValueError('path is missing; name a token store, or use source = "synthetic"')
        for name in ("path", "text"):
            if self.sources and (value := getattr(self, name)) is not None:
                raise ValueError(setting(name, value, "there are sources too", "leave out one of them"))
        return self

    @model_validator(mode="after")
    def _ramp_rises(self) -> Data:
        steps = [0, *(step for step, _ in self.batch_ramp)]
        for before, step in pairwise(steps):
            if step <= before:
                problem = f"does not come after step {before}"
                raise ValueError(setting("batch_ramp", step, problem, f"use steps that rise, such as {before + 1}"))
        return self

    @property
    def stores(self) -> tuple[Path, ...]:
        """The token stores that are read."""
        return tuple(one.path for one in self.sources) or ((self.path,) if self.path is not None else ())


OptimizerName = Literal["adamw", "sgd", "lion", "muon"]


class ParameterGroup(Section):
    """Weights that are updated otherwise than the rest."""

    match: str = Field(min_length=1, description="pattern of weight names, such as embed.* or *.q.weight")
    lr: float = Field(1.0, gt=0, description="factor of the learning rate")
    weight_decay: float | None = Field(None, ge=0, description="unset: as the rest")
    name: OptimizerName | None = Field(None, description="unset: as the rest")


class Optimizer(Section):
    """How weights are updated."""

    name: OptimizerName = Field("adamw", description="muon updates hidden matrices, and adamw the rest beside it")
    lr: float = Field(1e-3, gt=0)
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="adamw")
    eps: float = Field(1e-8, gt=0, description="adamw")
    momentum: Fraction = Field(0.0, description="sgd")
    lion_betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    muon_momentum: Fraction = 0.95
    weight_decay: float = Field(0.1, ge=0, description="on matrices; vectors do not decay unless a group says so")
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0 leaves gradients alone")
    skips: Interval = Field(
        10, description="steps in a row that may update nothing because a gradient is not finite; then the run ends"
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="of bf16 weights: from float32 copies, or without any, up or down at random by how near each is",
    )
    groups: tuple[ParameterGroup, ...] = Field((), description="a weight belongs to the first whose pattern matches")


class Schedule(Section):
    """The learning rate over the steps of a run."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: Interval = Field(0, description="steps of linear warm-up")
    decay: float = Field(0.2, ge=0, le=1, description="wsd: last share of the steps, over which the rate falls")
    floor: float = Field(0.1, ge=0, le=1, description="final rate as a share of the highest")


class Evaluation(Section):
    """Validation loss while training."""

    every: Interval = Field(0, description="steps between evaluations; 0 evaluates at the end only")
    batches: Count = Field(8, description="batches at most, each of data.batch samples")


class Checkpoint(Section):
    """What is saved, and how often."""

    every: Interval = Field(0, description="steps between saves; 0 saves at the end only")
    keep: Count = Field(2, description="newest checkpoints that stay")
    start: Path | None = Field(
        None, description="weights to begin with: a checkpoint, a run's or an import's folder, or a Hugging Face folder"
    )


class Log(Section):
    """Where metrics go besides the console and metrics.jsonl."""

    tensorboard: bool = False
    wandb: bool = False
    hashes: bool = Field(False, description="a hash of every batch, to see that two runs read the same")
    project: str = Field("shoal", description="Weights & Biases project")


class Memory(Section):
    """Where model states go that a layout's ``offload`` takes off the device, and what that may hold."""

    swap: Path | None = Field(
        None, description="folder of the files for offload=…:nvme, on a disk of this machine; unset: the run's folder"
    )
    budget_gib: float | None = Field(
        None, gt=0, description="what a rank may hold on its device; offload=optimizer:cpu then takes away what it must"
    )


class Run(Section):
    """The run as a whole."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    folder: Path = Field(Path("out"), description="checkpoints and metrics go to folder/name")
    steps: Count
    seed: int = Field(0, ge=0, lt=2**63)
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    stop: Interval = Field(0, description="end after this step, as an interruption would, having saved; 0: at the end")
    timeout: float = Field(
        600.0, gt=0, le=2.6e6, description="seconds after which a collective that nobody answers fails"
    )
    sample: str | None = Field(None, description="prompt of the text printed when training ends")
    sample_tokens: Count = 100
    expected_loss: float | None = Field(None, description="final validation loss that this file promises")
    expected_minutes: float | None = Field(None, description="how long it promises to take, and where")


class Config(Section):
    """A whole run file."""

    run: Run
    model: Model
    data: Data
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    memory: Memory = Memory()
    log: Log = Log()
    layout: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description='the keys of `--layout`, such as dp = 2 or tp = "4:2d"'
    )

    @model_validator(mode="after")
    def _samples_have_positions(self) -> Config:
        model, length = self.model, self.data.seq_len
        if model.positions == "learned" and length > model.max_positions:
            problem = f"is more than the {model.max_positions} positions that the model learns"
            legal = f"use at most {model.max_positions}, or a larger model.max_positions"
            raise ValueError(setting("data.seq_len", length, problem, legal))
        return self

    def plan(self) -> Layout:
        """The layout that the file names. Raises LayoutError where it is malformed."""
        return Layout.from_table(self.layout)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The run file at ``path`` with ``overrides`` (each ``section.key=value``, the value in TOML or a bare word).

    Raises :class:`ConfigError`, with one line per fault.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except PermissionError:
        raise ConfigError(f"run file {path}: it cannot be read; check its permissions") from None
    except OSError:
        raise ConfigError(
            f"run file {path}: there is no such file; runs/quickstart.toml is one to begin with"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"run file {path}: not valid TOML: {error}") from None
    for override in overrides:
        _override(table, override)
    return parse(table)


def parse(table: Mapping[str, Any]) -> Config:
    """A validated configuration from nested mappings. Raises :class:`ConfigError`, with one line per fault."""
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        # A default that is made of other settings has no fault of its own.
        lines = [explain(fault, Config) for fault in error.errors() if fault["type"] != "default_factory_not_called"]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def toml(config: Config) -> str:
    """The whole configuration, defaults included, as TOML that :func:`load` reads back."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _override(table: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f"--set {text}: write section.key=value, such as --set optimizer.lr=3e-4")
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    if not isinstance(table.setdefault(section, {}), dict):
        raise ConfigError(f"{section}: must be a section, [{section}]")
    table[section][name] = parsed
