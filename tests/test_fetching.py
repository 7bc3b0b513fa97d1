"""Downloads and packages, against a real server, the real npm and the real pip."""

import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from server import PAYLOAD, SHA256, Server

from relprop import fetching
from relprop.fetching import Package, UnavailableError

Client = Literal["npm", "pip"]
BYTES = os.urandom(9999)


def test_a_download_tells_how_far_it_is(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    got = fetching.download(
        f"{server.address}/whole", tmp_path / "x", sha256=SHA256[:8], progress=lambda *now: seen.append(now)
    )
    assert got == SHA256
    assert (tmp_path / "x").read_bytes() == PAYLOAD
    assert seen[-1] == (len(PAYLOAD), len(PAYLOAD))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_server_that_is_not_there_is_named(server: Server, tmp_path: Path) -> None:
    server.close()
    with pytest.raises(UnavailableError, match=re.escape(f"{server.address}/whole cannot be fetched")):
        fetching.download(f"{server.address}/whole", tmp_path / "x", sha256=SHA256)
    with pytest.raises(UnavailableError, match=re.escape(f"{server.address} cannot be reached")):
        fetching.probe(server.address)


def test_a_server_that_answers_anything_is_there(server: Server) -> None:
    fetching.probe(f"{server.address}/missing")


def test_a_silent_server_is_given_up(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "TIMEOUT", 0.3)
    with pytest.raises(UnavailableError, match="timed out"):
        fetching.download(f"{server.address}/stalled", tmp_path / "x", sha256=SHA256)


# ------------------------------------------------------------------------------------------------------------- packages

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
both = pytest.mark.parametrize("client", [pytest.param("npm", marks=needs_npm), "pip"])


@pytest.fixture
def registry(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server as a registry of either kind that holds one package, thing 1.0.0, and nothing else is asked."""
    tar, wheel = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:gz") as archive:
        for name, content in {"package.json": b'{"name": "thing", "version": "1.0.0"}', "x.bin": BYTES}.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/x.bin", BYTES)
        archive.writestr("thing-1.0.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0.0\n")
        archive.writestr("thing-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    dist = {"tarball": f"{server.address}/thing.tgz", "shasum": hashlib.sha1(tar.getvalue()).hexdigest()}
    version = {"name": "thing", "version": "1.0.0", "dist": dist}
    listing = {"name": "thing", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    server.files |= {
        "/thing": json.dumps(listing).encode(),
        "/thing.tgz": tar.getvalue(),
        "/thing/": b'<!DOCTYPE html><a href="../thing-1.0.0-py3-none-any.whl">thing</a>',
        "/thing-1.0.0-py3-none-any.whl": wheel.getvalue(),
    }
    monkeypatch.setenv("npm_config_registry", server.address)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.address)
    return server


def thing(client: Client, server: Server) -> Package:
    path, name = {
        "npm": ("/thing.tgz", "thing@1.0.0"),
        "pip": ("/thing-1.0.0-py3-none-any.whl", "thing==1.0.0"),
    }[client]
    content = server.files[path]
    return Package(client, name, hashlib.sha256(content).hexdigest(), len(content))


@both
def test_a_client_brings_a_package(registry: Server, tmp_path: Path, client: Client) -> None:
    package, seen = thing(client, registry), list[tuple[int, int | None]]()
    path = package.fetch(tmp_path, lambda *now: seen.append(now))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256
    assert seen[-1] == (package.size, package.size)


@both
def test_another_package_than_expected_is_refused(registry: Server, tmp_path: Path, client: Client) -> None:
    package = replace(thing(client, registry), sha256="0" * 64)
    with pytest.raises(UnavailableError, match=rf"{client} brought another thing.*1\.0\.0: .* and not 0000"):
        package.fetch(tmp_path)


@both
def test_a_package_that_is_not_there_is_named(registry: Server, tmp_path: Path, client: Client) -> None:
    package = thing(client, registry)
    del registry.files["/thing"], registry.files["/thing/"]
    says = {"npm": "E404", "pip": "Could not find a version"}[client]
    with pytest.raises(UnavailableError, match=rf"The {client} package thing.*1\.0\.0 cannot be fetched: {says}"):
        package.fetch(tmp_path)


@both
def test_a_package_that_is_cut_short_is_refused(registry: Server, tmp_path: Path, client: Client) -> None:
    package = thing(client, registry)
    for path in ("/thing.tgz", "/thing-1.0.0-py3-none-any.whl"):
        registry.files[path] = registry.files[path][:5000]
    with pytest.raises(UnavailableError, match=rf"package thing.* cannot be fetched: |{client} brought another thing"):
        package.fetch(tmp_path)


@both
def test_a_registry_that_is_not_there_fails_at_once(registry: Server, tmp_path: Path, client: Client) -> None:
    package = thing(client, registry)
    registry.close()
    says = {"npm": "ECONNREFUSED", "pip": "NewConnectionError: Could not find"}[client]
    with pytest.raises(UnavailableError, match=rf"The {client} package .* cannot be fetched: {says}") as caught:
        package.fetch(tmp_path)
    assert "\n" not in str(caught.value)


@both
def test_a_client_is_given_up_when_it_brings_nothing(
    registry: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    package = thing(client, registry)
    monkeypatch.setattr(registry, "answer", lambda _: registry.going_on.wait(60))
    monkeypatch.setattr(fetching, "CLIENT_TIMEOUT", 3.0)
    with pytest.raises(UnavailableError, match=f"{client} brought nothing for 3 s"):
        package.fetch(tmp_path)


@pytest.mark.parametrize("client", ["npm", "pip"])
def test_a_missing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pip", None)  # what Python itself does for a module that is not to be found
    with pytest.raises(UnavailableError, match=f"The {client} package thing needs the {client} client, which is not"):
        Package(client, "thing", "0" * 64, 1).fetch(tmp_path)
