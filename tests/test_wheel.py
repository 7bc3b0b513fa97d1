"""What is released: the source archive and the wheel built from it, installed where the repository cannot be seen."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import relprop

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src"

SMALL = """
import torch, relprop
from relprop.images import PHOTO
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)).eval()
e = relprop.explain(net, torch.rand(1, 3, 8, 8))
assert e.ledger.error.max() < 1e-5
assert PHOTO.is_file() and len(relprop.classes.imagenet_synsets()) == 1000
print(relprop.__file__)
"""


def run(*command: object, folder: Path, code: int = 0) -> str:
    """Runs a command that sees nothing of the repository, nor of this process' environment."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    env = {**kept, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "RELPROP_CACHE": str(folder / "cache")}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=folder, env=env)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout + done.stderr


def build(folder: Path) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it; by the tools that are installed."""
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    run(*command, folder=folder)
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return archive, wheel


def empty(folder: Path, wheel: Path, extra: str) -> Path:
    """An environment with the wheel and nothing but what it asks for, which is linked to where it is installed.

    To install torch again would take minutes; `make install` does.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    home = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    about = zipfile.ZipFile(wheel).read(f"relprop-{relprop.__version__}.dist-info/METADATA").decode()
    wanted = [Requirement(line.partition(":")[2]) for line in about.splitlines() if line.startswith("Requires-Dist:")]
    todo, seen = [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": extra})], set()
    while todo:
        requirement = todo.pop()
        if requirement.name in seen:
            continue
        seen.add(requirement.name)
        there = metadata.distribution(requirement.name)
        for top in {file.parts[0] for file in there.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link, target = home / top, Path(str(there.locate_file(top)))
            if target.exists() and not link.exists():
                link.symlink_to(target)
        inner = map(Requirement, there.requires or ())
        todo += [r for r in inner if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert not (home / "relprop").exists()
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=folder)
    return python


def test_the_wheel_works_without_the_repository(tmp_path: Path) -> None:
    archive, wheel = build(tmp_path)
    ours = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in packed if name.startswith("relprop/")} == ours
    assert {"relprop/py.typed", "relprop/data/chelsea.jpg", "relprop/data/imagenet-synsets.txt"} <= packed
    assert {name.rpartition("/")[2] for name in packed - ours} >= {"LICENSE", "NOTICE", "entry_points.txt"}
    with tarfile.open(archive) as opened:
        sources = {name.partition("/")[2] for name in opened.getnames()}
    assert sources >= {"CHANGELOG.md", "CITATION.cff", "NOTICE", "tests/test_wheel.py", "src/relprop/py.typed"}

    bare = empty(tmp_path / "bare", wheel, "")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert str(bare.parent.parent) in run(bare, "-W", "error", "-c", SMALL, folder=folder)
    command = bare.with_name("relprop")
    assert run(command, "--version", folder=folder) == f"relprop {relprop.__version__}\n"
    looked = run(command, "doctor", folder=folder)
    assert "all is well" in looked
    assert "extra    vision: lacks torchvision" in looked
    refused = run(command, "explain", "--model", "resnet18", "--weights", "random", folder=folder, code=2)
    assert refused.count("\n") == 1
    assert "pip install 'relprop[vision]'" in refused

    seeing = empty(tmp_path / "seeing", wheel, "vision")
    said = run(
        seeing.with_name("relprop"), "explain", "--model", "resnet18", "--weights", "random", "--json", folder=folder
    )
    assert '"synset": "n0' in said
    assert (folder / "out/chelsea/figure.png").is_file()
