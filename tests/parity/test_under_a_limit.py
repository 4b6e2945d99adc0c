"""A model whose states are four times what the operating system lets the process have beside its programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
from pathlib import Path
from shoal.comm.world import World
from shoal.config import load
from shoal.layout import Layout
from shoal.train.setup import make_engine, make_model, open_data

layout = Layout.parse("dtype=bf16{grads=bf16},recompute=full" + sys.argv[2])


def read(hidden, layers):
    sizes = {"hidden": hidden, "ffn": 3 * hidden, "layers": layers, "dropout": 0}
    data = ["data.seq_len=8", "data.batch=1", f"memory.swap={sys.argv[1]}"]
    return load(Path("runs/tiny.toml"), [f"model.{key}={value}" for key, value in sizes.items()] + data)


def held():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def train(config, steps):
    engine, source = make_engine(config, layout, world), open_data(config)
    return [engine.step(source.batch(step)).loss for step in range(steps)]


with World() as world:
    train(read(64, 1), 1)  # what programs take besides
    config = read(768, 16)
    parameters = sum(one.numel() for one in make_model(config, layout).parameters())
    limit = held() + 16 * parameters // 4  # parameters and gradients 2 bytes each, masters 4, moments 8
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(train(config, 2))
"""


@pytest.mark.parity
def test_it_trains_with_a_disk_and_does_not_without(tmp_path: Path) -> None:
    """The limit is on all of the process's memory: what is on the host counts too."""

    def run(offload: str) -> subprocess.CompletedProcess[str]:
        given = [sys.executable, "-c", SCRIPT, str(tmp_path), offload]
        return subprocess.run(given, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])

    away = run(",offload=optimizer:nvme+params:nvme")
    assert away.returncode == 0, away.stderr
    here = run("")
    assert here.returncode != 0
    assert "allocate memory" in here.stderr
    assert list(tmp_path.iterdir()) == []
