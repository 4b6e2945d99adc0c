from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.config import Config, load, parse, toml
from shoal.errors import ConfigError, LayoutError
from shoal.layout import Layout

BASE: dict[str, dict[str, Any]] = {
    "run": {"steps": 3},
    "model": {"layers": 1, "hidden": 24, "heads": 6, "ffn": 4, "vocab": 9},
    "data": {"source": "synthetic", "seq_len": 4, "batch": 2},
}


def table(**sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in BASE | sections}


def fault(**sections: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(table(**sections))
    return str(caught.value)


def written(folder: Path, text: str | None = None) -> Path:
    path = folder / "run.toml"
    path.write_text(text or toml(parse(BASE)))
    return path


def test_what_is_left_out_has_its_default_and_key_value_heads_are_all_heads() -> None:
    config = parse(BASE)
    assert config.model.kv_heads == 6
    assert parse(table(model={"kv_heads": 2})).model.kv_heads == 2
    assert (config.model.head_dim, config.model.experts) == (4, 0)
    assert config.optimizer.name == "adamw"
    assert config.plan() == Layout()
    with pytest.raises(ValidationError, match="frozen"):
        config.run.steps = 5


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimizer": {"lrr": 1}}, "optimizer.lrr: unknown key (did you mean 'lr'?); known here: betas, clip,"),
        ({"optimiser": {"lr": 1}}, "optimiser: unknown key (did you mean 'optimizer'?)"),
        ({"model": {"qqq": 1}}, "model.qqq: unknown key; known here: activation"),
        ({"model": {"layers": 0}}, "model.layers = 0: input should be greater than or equal to 1; use 8"),
        ({"model": {"hidden": 40}}, "model.hidden = 40: must be heads (6) times an even head size; use 36"),
        ({"model": {"hidden": 18}}, "model.hidden = 18: must be heads (6) times an even head size; use 24"),
        ({"model": {"kv_heads": 4}}, "model.kv_heads = 4: must divide heads (6); use one of [1, 2, 3, 6]"),
        ({"model": {"head_dim": 5}}, "model.head_dim = 5: must be even; use 6"),
        (
            {"model": {"positions": "learned", "hidden": 25}},
            "model.hidden = 25: must be heads (6) times a head size; use 24",
        ),
        (
            {"model": {"positions": "learned", "rope_scaling": {"kind": "linear", "factor": 2}}},
            "model.rope_scaling = linear: learned positions have no rotary angles; leave it out, or use positions = ",
        ),
        (
            {"model": {"positions": "learned", "rope_theta": 500.0}},
            "model.rope_theta = 500.0: learned positions have no rotary angles; leave it out, or use positions = ",
        ),
        (
            {"model": {"rope_scaling": {"kind": "llama3", "factor": 2, "low_freq_factor": 4}}},
            "model.rope_scaling.high_freq_factor = 4.0: must be more than low_freq_factor (4.0); use 16.0",
        ),
        (
            {"model": {"rope_scaling": {"kind": "linear", "factor": 2, "original_positions": 4096}}},
            "model.rope_scaling.original_positions = 4096: linear scaling stretches all angles alike; leave it 8192,",
        ),
        (
            {"model": {"positions": "learned", "max_positions": 3}},
            "data.seq_len = 4: is more than the 3 positions that the model learns; use at most 3, or a larger",
        ),
        ({"data": {"source": "tokens"}}, "data.path is missing"),
        ({"data": {"path": "a", "sources": [{"path": "b"}]}}, "data.path = a: there are sources too; leave out one"),
        ({"data": {"sources": [{"path": "b", "weight": 0}]}}, "data.sources.0.weight = 0: input should be greater"),
        ({"data": {"sources": [{"path": "b", "wieght": 1}]}}, "data.sources.0.wieght: unknown key (did you mean"),
        ({"data": {"batch_ramp": [[5, 8], [5, 9]]}}, "data.batch_ramp = 5: does not come after step 5; use steps that"),
        ({"data": {"batch_ramp": [[0, 8]]}}, "data.batch_ramp.0.0 = 0: input should be greater than or equal to 1"),
        ({"data": {"packing": "whole"}}, "data.packing = whole: input should be 'stream' or 'documents'"),
        (
            {"schedule": {"kind": "cosinus"}},
            "schedule.kind = cosinus: input should be 'constant', 'linear', 'cosine' or 'wsd'",
        ),
        (
            {"schedule": {"kind": "cosinus"}},
            "schedule.kind = cosinus: input should be 'constant', 'linear', 'cosine' or 'wsd' (did",
        ),
        (
            {"optimizer": {"name": "adam"}},
            "optimizer.name = adam: input should be 'adamw', 'sgd', 'lion' or 'muon' (did you mean 'ad",
        ),
        ({"optimizer": {"groups": [{"match": "a", "rate": 1}]}}, "optimizer.groups.0.rate: unknown key"),
        ({"optimizer": {"groups": [{"lr": 1}]}}, "optimizer.groups.0.match: missing"),
        (
            {"optimizer": {"betas": [0.9, 1.0]}},
            "optimizer.betas.1 = 1.0: input should be less than 1; its default is [0.9, ",
        ),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr = nan: input should be a finite number"),
        (
            {"run": {"name": "a/b"}},
            "run.name = a/b: string should match pattern '^[A-Za-z0-9_][A-Za-z0-9._-]*$'; its default is ",
        ),
        (
            {"run": {"folder": 3}},
            "run.folder = 3: input is not a valid path for <class 'pathlib.Path'>; its default is \"out\"",
        ),
        ({"model": {"gate_scale": 2.5}}, "model.gate_scale = 2.5: the model has no experts; leave it out, or set exp"),
        ({"model": {"experts_per_token": 4}}, "model.experts_per_token = 4: the model has no experts; leave it out"),
        ({"model": {"window": 0}}, "model.window = 0: input should be greater than or equal to 1; leave it out"),
        ({"model": {"kv_heads": "x"}}, "model.kv_heads = x: input should be a valid integer; leave it out"),
        (
            {"model": {"rope_scaling": {"kind": "x", "factor": 2}}},
            "model.rope_scaling.kind = x: input should be 'linear', 'llama3' or 'yarn'; use lin",
        ),
        (
            {"data": {"sources": [{"path": 3}]}},
            "data.sources.0.path = 3: input is not a valid path for <class 'pathlib.Path'>; it is a token",
        ),
        (
            {"layout": {"dp": [1]}},
            'layout.dp = [1]: is neither a whole number nor text; use one of them, as in dp = 2 or tp = "4:2d"',
        ),
        ({"run": {"steps": "many"}}, "run.steps = many: input should be a valid integer"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_its_value_and_a_legal_one(
    sections: dict[str, dict[str, Any]], message: str
) -> None:
    assert fault(**sections).startswith(message)
    assert "\n" not in fault(**sections)


def test_every_fault_of_a_file_has_a_line_of_its_own() -> None:
    lines = fault(run={"steps": 0}, model={"vocab": None, "ffn": -1}, data={"sequence": 3}).splitlines()
    assert [line.split()[0].strip(":") for line in lines] == ["run.steps", "model.ffn", "model.vocab", "data.sequence"]
    with pytest.raises(ConfigError, match=r"(?m)^model: missing.*\ndata: missing"):
        parse({"run": {"steps": 1}})


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"schedule": {"decay": 1.5}}, "schedule.decay = 1.5"),
        ({"model": {"kv_heads": "0"}}, "model.kv_heads = 0"),
        ({"run": {"name": ".."}}, "run.name = .."),
        ({"run": {"timeout": float("inf")}}, "run.timeout = inf"),
    ],
)  # fmt: skip
def test_these_are_refused_in_one_line_too(sections: dict[str, dict[str, Any]], named: str) -> None:
    assert fault(**sections).startswith(named)
    assert "\n" not in fault(**sections)


def test_a_malformed_layout_is_refused_when_it_is_asked_for() -> None:
    with pytest.raises(LayoutError, match=r"^layout\.dp = 1\.5"):
        parse(table(layout={"dp": 1.5})).plan()


def test_a_file_and_what_is_set_on_top_of_it(tmp_path: Path) -> None:
    config = load(
        written(tmp_path),
        ["optimizer.lr=3e-4", "model.tied = true", "layout.tp=4:2d", "run.name=other", "optimizer.betas=[0.8, 0.9]"],
    )
    assert (config.optimizer.lr, config.model.tied, config.run.name) == (3e-4, True, "other")
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.plan() == Layout.parse("tp=4:2d")
    assert load(written(tmp_path)) == parse(BASE)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=3", "--set lr=3: write section.key=value"),
        ("optimizer.lr", "write section.key=value"),
        (".lr=3", "write section.key=value"),
        ("optimizer.lrr=3", "did you mean 'lr'"),
        ("optimizer.lr=fast", "optimizer.lr = fast"),
        ("optimzer.lr=3", "did you mean 'optimizer'"),
    ],
)
def test_an_override_that_cannot_be_used_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path), [override])
    assert message in str(caught.value)


def test_a_file_that_is_none_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="there is no such file"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(written(tmp_path, "[run\n"))
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="run: must be a section"):
        load(written(tmp_path, "run = 3\n"), ["run.steps=3"])


TEXT = st.text(st.sampled_from("aé\u2028\U0001f3d6 \n\t\"'\\[]#="))


@given(TEXT, st.floats(1e-12, 1e6), st.booleans(), st.sampled_from(["4:2d", 4, "2:ring"]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_printed_configuration_reads_back_as_itself(text: str, lr: float, tied: bool, size: int | str) -> None:
    config = parse(
        table(data={"separator": text, "path": f"a/{text}"}, optimizer={"lr": lr}, model={"tied": tied},
              layout={"tp": size}, run={"sample": text})
    )  # fmt: skip
    assert parse(tomllib.loads(toml(config))) == config


def test_groups_of_the_optimizer_read_back_in_their_order_and_can_be_set(tmp_path: Path) -> None:
    groups = [{"match": "*.q.weight", "lr": 0.5}, {"match": "embed.*", "weight_decay": 0.0, "name": "lion"}]
    config = parse(table(optimizer={"name": "muon", "groups": groups}))
    assert [(one.match, one.lr, one.weight_decay, one.name) for one in config.optimizer.groups] == [
        ("*.q.weight", 0.5, None, None), ("embed.*", 1.0, 0.0, "lion"),
    ]  # fmt: skip
    assert parse(tomllib.loads(toml(config))) == config
    one = load(written(tmp_path), ['optimizer.groups=[{match = "embed.*", name = "sgd"}]']).optimizer.groups
    assert [(group.match, group.name) for group in one] == [("embed.*", "sgd")]


@pytest.mark.parametrize("text", ["\r\n", "\x0c", "\x1b", "\x7f"], ids=ascii)
def test_a_printed_separator_of_control_characters_reads_back_as_itself(text: str) -> None:
    config = parse(table(data={"separator": text}))
    assert parse(tomllib.loads(toml(config))) == config


def test_the_planners_choice_can_be_asked_for_in_a_run_file() -> None:
    assert parse(table(layout={"auto": True})).plan() == Layout(auto=True)


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("runs/*.toml")), ids=lambda path: path.stem)
def test_the_shipped_run_files_are_valid(path: Path) -> None:
    config = load(path)
    config.plan().check(config.model, config.data.batch, config.plan().ranks)
    assert isinstance(config, Config)
