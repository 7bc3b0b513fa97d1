"""What every test may lean on: the sample data, deterministic models, one torch thread a worker."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from server import Server
from torch import nn

from relprop.compat import import_torchvision

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers already share the cores out

# The same examples on every run: a failure seen once can be seen again, and a slow machine is no failure.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("ci")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of sample images, or a skip that says how to name it."""
    path = Path(os.environ.get("RELPROP_DATA", ROOT / "../shared/data")).resolve()
    if not path.is_dir():
        pytest.skip(f"no sample data at {path}: set RELPROP_DATA to the folder that holds imagenet-val-200")
    return path


@pytest.fixture(scope="session")
def torchvision_model() -> Callable[..., nn.Module]:
    """`torchvision_model(name, seed=0)`: a new model in eval mode with random weights and BN statistics."""
    return build_torchvision_model


def build_torchvision_model(name: str, seed: int = 0) -> nn.Module:
    """Fresh BN layers are nearly the identity and would hide mistakes, so each one gets its own random numbers."""
    models = import_torchvision().models
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: nn.Module = models.get_model(name, weights=None).eval()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 1.5)
                module.weight.normal_(std=0.5)  # half are negative; a wider spread overflows softmax at 150 layers
                module.bias.normal_(std=0.1)
    return model


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of weights."""
    monkeypatch.setenv("RELPROP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sources of weights are out of reach, on any machine."""
    nowhere = "http://127.0.0.1:9"  # the port of a service that is off everywhere
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower() == "no_proxy"]:
        monkeypatch.delenv(name)
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "npm_config_registry", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, nowhere)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
