"""The cache, against a real server, real processes, and folders that take nothing."""

import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server import PAYLOAD, SHA256, TENSORS, Server

import relprop
from relprop import RelpropError, cache, fetching
from relprop.fetching import UnavailableError

# What a process does that is to be killed, starved or raced: fetch the weights from a url into RELPROP_CACHE.
FETCH = """
import sys
from relprop import RelpropError, cache, fetching, weights
url, sha256 = sys.argv[1:]
def make(work):
    fetching.download(url, work / "fetched.pth", sha256=sha256)
    return weights.read(work / "fetched.pth").tensors, {"origin": url}
try:
    print(cache.fetch("net-published", make).path.name)
except RelpropError as error:
    sys.exit(str(error))
"""


def maker(calls: list[Path]) -> Callable[[Path], cache.Made]:
    def make(work: Path) -> cache.Made:
        calls.append(work)
        return TENSORS, {"origin": "here"}

    return make


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name != ".lock") if folder.exists() else []


def start(url: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(relprop.__file__).parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", FETCH, url, SHA256], env=environment, **pipes, **options)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELPROP_CACHE", "/a")
    assert cache.folder() == Path("/a")
    monkeypatch.delenv("RELPROP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache.folder() == Path("/b/relprop")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache/relprop"


def test_weights_are_made_once_and_kept_in_one_file_named_after_its_hash(cache_folder: Path) -> None:
    calls: list[Path] = []
    first = cache.fetch("net-mine", maker(calls))
    second = cache.fetch("net-mine", maker(calls))
    assert len(calls) == 1
    assert not calls[0].exists()
    assert files_in(cache_folder) == [f"net-mine-{first.sha256[:16]}.safetensors"]
    assert hashlib.sha256(first.path.read_bytes()).hexdigest() == first.sha256 == second.sha256
    assert second.about == {"origin": "here"}
    assert all(torch.equal(second.tensors[name], TENSORS[name]) for name in TENSORS)
    assert cache.cached("net") is None
    assert cache.cached("net-other") is None


def test_the_same_weights_have_the_same_hash_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for name in "ab":
        monkeypatch.setenv("RELPROP_CACHE", str(tmp_path / name))
        hashes.add(cache.fetch("net-mine", maker([])).sha256)
    assert len(hashes) == 1


@pytest.mark.parametrize("damage", ["cut", "emptied", "flipped"])
def test_a_damaged_file_is_noticed_and_fetched_anew(cache_folder: Path, damage: str) -> None:
    calls: list[Path] = []
    path = cache.fetch("net-mine", maker(calls)).path
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1000] ^= 1
    path.write_bytes({"cut": whole[: len(whole) // 2], "emptied": b"", "flipped": bytes(flipped)}[damage])
    lines: list[str] = []
    again = cache.fetch("net-mine", maker(calls), lines.append)
    assert len(calls) == 2
    assert again.path.read_bytes() == whole
    assert "is damaged" in lines[0]
    assert files_in(cache_folder) == [path.name]


def test_nothing_stays_behind_when_making_fails(cache_folder: Path) -> None:
    def make(work: Path) -> cache.Made:
        (work / "half").write_bytes(b"x" * 1000)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.fetch("net-mine", make)
    assert files_in(cache_folder) == []


@pytest.mark.parametrize(
    ("path", "says"), [("/other", "SHA-256 begins with"), ("/cut", "broke off after"), ("/missing", "Not Found")]
)
def test_what_a_server_sends_wrong_is_not_kept(server: Server, cache_folder: Path, path: str, says: str) -> None:
    def make(work: Path) -> cache.Made:
        fetching.download(server.address + path, work / "fetched", sha256=SHA256[:8])
        return TENSORS, {}

    with pytest.raises(UnavailableError, match=says):
        cache.fetch("net-mine", make)
    assert files_in(cache_folder) == []


def test_a_killed_download_does_no_harm(server: Server, cache_folder: Path) -> None:
    url = f"{server.address}/stalled"
    with start(url) as process:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in cache_folder.glob("*.partial/*")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(cache_folder.glob("*.partial"))
    assert cache.cached("net-published") is None
    server.going_on.set()
    with start(url) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert files_in(cache_folder) == [out.strip()]
    found = cache.cached("net-published")
    assert found is not None
    assert torch.equal(found.tensors["fc.weight"], TENSORS["fc.weight"])


def test_processes_at_once_fetch_once(server: Server, cache_folder: Path) -> None:
    processes = [start(f"{server.address}/whole") for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert server.asked == ["/whole"]
    assert files_in(cache_folder) == [outputs[0][0].strip()]


# -------------------------------------------------------------------------------------------- folders that take nothing


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """Takes away the right to write in a folder; from root, too, who has to become someone else for that."""
    user = os.geteuid()

    def lock(path: Path) -> None:
        path.chmod(0o555)
        if user == 0:
            os.seteuid(65534)

    yield lock
    if user == 0:
        os.seteuid(0)


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that any user may look into, unlike pytest's own folders."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    monkeypatch.setenv("RELPROP_CACHE", str(path))
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


def test_a_read_only_cache_says_so_before_anything_is_fetched(open_folder: Path, read_only: Any) -> None:
    calls: list[Path] = []
    read_only(open_folder)
    with pytest.raises(RelpropError, match=r"cannot be kept in .*: Permission denied; .*RELPROP_CACHE") as caught:
        cache.fetch("net-mine", maker(calls))
    assert not isinstance(caught.value, UnavailableError)
    assert not calls


def test_what_is_in_a_read_only_cache_is_used(open_folder: Path, read_only: Any) -> None:
    calls: list[Path] = []
    cache.fetch("net-mine", maker(calls)).path.chmod(0o444)
    read_only(open_folder)
    assert cache.fetch("net-mine", maker(calls)).about == {"origin": "here"}
    assert len(calls) == 1


def test_a_cache_that_is_a_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RELPROP_CACHE", str(tmp_path / "file"))
    with pytest.raises(RelpropError, match=r"cannot be kept in .*: File exists"):
        cache.fetch("net-mine", maker([]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_says_so(server: Server, cache_folder: Path) -> None:
    def make(_: Path) -> cache.Made:
        fetching.download(f"{server.address}/whole", Path("/dev/full"), sha256=SHA256)
        return TENSORS, {}

    with pytest.raises(RelpropError, match=r"cannot be kept in .*: No space left on device; make room"):
        cache.fetch("net-mine", make)
    assert files_in(cache_folder) == []


def test_a_file_that_may_not_grow_leaves_nothing_behind(server: Server, cache_folder: Path) -> None:
    limit = len(PAYLOAD) // 3
    with start(
        f"{server.address}/whole", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    ) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(r"The weights cannot be kept in .*: File too large; make room there.*\n", err)
    assert files_in(cache_folder) == []
