"""The server's parts: limits, the gate, visits, the guard, the JSON interface and reports."""

import base64
import io
import json
import re
import signal
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import schemathesis
import tiny
import torch
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from PIL import Image
from safetensors.torch import save_file
from schemathesis.specs.openapi.checks import positive_data_acceptance
from visiting import SMALL, running

from relprop import RelpropError, cli, explain, load
from relprop.app.answer import Answer, Question, answer
from relprop.app.api import api
from relprop.app.bundle import bundle
from relprop.app.desk import Desk
from relprop.app.flow import flow, words
from relprop.app.gate import Gate, Turn
from relprop.app.limits import BusyError, LateError, Limits, StoppedError, TooLargeError, called, read_photo
from relprop.app.report import report, saved
from relprop.app.shelf import Shelf, Wanted
from relprop.app.visits import House, Visits
from relprop.figure import limit
from relprop.heatmap import colorize
from relprop.images import PHOTO, SAMPLES, read

LIMITS = Limits()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    return tiny.photos(tmp_path / "photos", 1) / "00.png"


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk([tiny.model()], LIMITS)
    yield desk
    desk.close()


@pytest.fixture(scope="module")
def answered() -> Answer:
    return answer(load("resnet18", "random"), read(PHOTO), "chelsea.jpg", Question())


# -- limits --


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.png", b"", "empty.png is no image of a kind that can be read"),
        ("words.txt", b"hello", "words.txt is no image of a kind that can be read"),
        ("script.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "script.eps is no image of a kind"),
        ("cut.jpg", PHOTO.read_bytes()[:9000], "cut.jpg is damaged or cut short"),
    ],
)
def test_a_bad_photo_gets_a_sentence_without_our_paths(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / "secret-place"
    path.write_bytes(content)
    with pytest.raises(RelpropError, match=re.escape(said)) as refused:
        read_photo(path, name, LIMITS)
    assert "secret" not in str(refused.value)


def test_a_photo_is_limited_in_bytes_and_pixels_before_it_is_decoded(photo: Path) -> None:
    assert read_photo(photo, "photo", LIMITS).size == (40, 40)
    with pytest.raises(TooLargeError, match="photo has 40 x 40 pixels"):
        read_photo(photo, "photo", replace(LIMITS, pixels=1599))
    with pytest.raises(TooLargeError, match="MB and this server takes"):
        read_photo(photo, "photo", replace(LIMITS, photo=photo.stat().st_size - 1))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("cat.jpg", "cat.jpg"),
        ("../../cat.jpg", "cat.jpg"),
        ("C:\\photos\\cat.jpg", "cat.jpg"),
        ("Käfer 2.jpg", "Käfer 2.jpg"),
        ("..", "image"),
        (None, "image"),
        ("a\r\nX: b\0\ud800\u202e.jpg", "aX: b.jpg"),
        ("x" * 999, "x" * 100),
    ],
)
def test_a_visitors_name_for_a_file_is_one_that_can_be_shown_and_saved(given: str | None, shown: str) -> None:
    assert called(given) == shown


def test_a_file_that_is_two_kinds_at_once_is_decoded_as_the_one_that_was_checked(tmp_path: Path) -> None:
    """As a TGA it has 32 x 16 pixels, as an icon those of the PNG inside."""
    inner = io.BytesIO()
    Image.new("1", (3000, 3000)).save(inner, format="PNG")
    size = 0x080010  # what an icon calls the PNG's bytes is a TGA's height and depth
    entry = struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, size, 22)
    both = tmp_path / "both"
    both.write_bytes(entry + inner.getvalue().ljust(size, b"\0"))
    assert read(both).size == (3000, 3000)
    with pytest.raises(RelpropError, match="both is damaged"):  # it is no good TGA
        read_photo(both, "both", LIMITS)


def test_a_photo_that_takes_too_long_to_decode_is_given_up_on_the_way() -> None:
    left = [1] * 5

    def check() -> None:
        if not left:
            raise LateError("Too late.")
        left.pop()

    with pytest.raises(LateError):
        read_photo(PHOTO, "photo", LIMITS, check)


# -- the gate --


def test_the_gate_lets_one_in_after_another_and_turns_the_rest_away() -> None:
    gate, going, order = Gate(replace(LIMITS, waiting=1)), threading.Event(), []
    first = threading.Thread(target=lambda: gate.run(lambda: going.wait(30)))
    first.start()
    while gate._inside < 1:
        time.sleep(0.01)
    second = threading.Thread(target=lambda: gate.run(lambda: order.append("second")))
    second.start()
    while gate._inside < 2:
        time.sleep(0.01)
    with pytest.raises(BusyError, match="1 requests are waiting"):
        gate.run(lambda: order.append("third"))
    assert order == []
    going.set()
    first.join()
    second.join()
    gate.run(lambda: order.append("fourth"))
    assert order == ["second", "fourth"]
    gate.close()


def test_what_takes_too_long_is_given_up_and_what_is_stopped_ends() -> None:
    gate, going = Gate(replace(LIMITS, seconds=0.05)), threading.Event()
    with pytest.raises(LateError, match=r"longer than the 0\.05 seconds"):
        gate.run(lambda: going.wait(30))
    going.set()
    turn = Turn(LIMITS)

    def work() -> None:
        turn.tell(0.5, "half")
        turn.stop()
        turn.tell(0.6, "more")

    with pytest.raises(StoppedError):
        gate.run(work, turn)
    assert turn.part == 0.6
    turn, going = Turn(LIMITS), threading.Event()
    threading.Timer(0.05, turn.stop).start()
    with pytest.raises(StoppedError):  # at once, though what is inside goes on
        gate.run(lambda: going.wait(30), turn)
    assert gate.busy
    going.set()
    turn = Turn(LIMITS)
    turn.begin()
    turn.deadline = time.monotonic() - 1
    with pytest.raises(LateError):
        turn.tell(0.5, "half")
    gate.close()


# -- visits --


def test_a_visit_leaves_nothing_behind(photo: Path) -> None:
    house = House()
    over: list[str] = []
    visits = Visits(house.visits, replace(LIMITS, visits=2), over.append)
    upload = house.uploads / "abc" / "photo.png"
    upload.parent.mkdir()
    upload.write_bytes(photo.read_bytes())
    first = visits.of("first")
    kept = first.keep(upload)
    assert kept.read_bytes() == photo.read_bytes()
    assert visits.find(first.token) is first
    with pytest.raises(RelpropError, match="visit is over"):
        visits.find("guess")
    visits.of("second")
    visits.of("third")  # one too many: the oldest goes
    assert len(visits) == 2
    assert over == [first.token]
    assert not kept.exists()
    assert not upload.exists()
    visits.close()
    house.close()
    assert not house.folder.exists()


def test_idle_visits_end_and_folders_of_killed_servers_are_removed() -> None:
    killed = House()
    (killed.uploads / "photo").write_bytes(b"x")
    alive = House()
    assert killed.folder.exists()  # its process, this one, is alive
    assert killed._lock is not None
    killed._lock.close()
    visits = Visits(alive.visits, replace(LIMITS, idle=0.0))
    visits.of("idle")
    time.sleep(0.01)
    visits.sweep()
    assert len(visits) == 0
    another = House()
    assert not killed.folder.exists()
    assert alive.folder.exists()
    another.close()
    alive.close()


# -- models --


def test_a_visitor_gets_only_what_is_offered(tmp_path: Path, photo: Path) -> None:
    shelf = Shelf([tiny.model()])
    assert shelf.get(Wanted()).name == "tiny"
    assert shelf.offers["resnet18"] == ("random",)
    for wanted in (Wanted("timm:resnet18"), Wanted("../secret"), Wanted(str(photo))):
        with pytest.raises(RelpropError, match="This server has no model"):
            shelf.get(wanted)
    with pytest.raises(RelpropError, match="This server has no weights"):
        shelf.get(Wanted("resnet18", str(photo)))
    own = tmp_path / "own.safetensors"
    weights = load("resnet18", "random", classes=["cat", "dog"]).module.state_dict()
    save_file(weights, own)
    mine = shelf.get(Wanted("resnet18", None, own, "me"))
    assert mine.outputs == 2
    assert shelf.get(Wanted("resnet18", None, own, "me")) is mine
    shelf.forget("me")
    assert not shelf._loaded

    def refused(said: str) -> None:
        with pytest.raises(RelpropError, match=said) as refused:
            shelf.get(Wanted("resnet18", None, own, "you"))
        assert str(tmp_path) not in str(refused.value)
        shelf.forget("you")

    # What a file says of itself is a stranger's word too.
    wants = json.loads(mine.preparation.written())
    for about, said in (
        ([1], "has metadata of relprop's name"),
        ({"classes": ["cat", "dog"]}, "has metadata of relprop's name"),
        ({"classes": "7"}, "say of their classes"),
        ({"preparation": "{}"}, "say of their classes"),
        ({"preparation": json.dumps({**wants, "crop": 30_000})}, "wants images of 30000 pixels"),
    ):
        save_file(weights, own, {"relprop": json.dumps(about)})
        refused(said)
    for bias in (torch.zeros(10**11, 0), torch.zeros(0)):  # no bytes, and yet so many classes, or none
        save_file({**weights, "fc.bias": bias}, own)
        refused(r"^Your checkpoint does not fit resnet18")
    own.write_bytes(b"nothing")
    refused(r"^Your checkpoint is cut short")


# -- what is said --


def test_the_answer_is_the_engines_with_a_map_at_every_block(answered: Answer) -> None:
    model = load("resnet18", "random")
    x = model.prepare(PHOTO)[None]
    whole = explain(model, x, layers=["layer3.1"])
    assert torch.equal(answered.stops[-1].map, whole.heatmap[0])
    names = [stop.name for stop in answered.stops]
    assert names[:2] == ["the input of avgpool", "the input of layer4.1"]
    assert names[-2:] == ["the input of layer1.0", "the pixels"]
    kept = next(stop.map for stop in answered.stops if stop.name == "the input of layer3.1")
    assert torch.allclose(kept, whole.relevance_at("layer3.1")[0].sum(0), atol=1e-9)
    start = float(whole.start[0])
    assert all(float(stop.map.sum()) == pytest.approx(start, rel=1e-4) for stop in answered.stops)
    assert [round(share.skip + share.residual, 9) for share in answered.shares] == [1.0] * 8


def test_a_contrast_is_the_difference_of_two_maps_of_one() -> None:
    model = tiny.model()
    picture = read(SAMPLES["coffee"])
    found = answer(model, picture, "coffee", Question(target=3, contrast=7))
    both = explain(model, model.prepare(picture)[None], torch.tensor([[3, 7]]), start="one").heatmap[0]
    assert found.contrast is not None
    assert found.contrast[0]["class"] == 7
    assert torch.allclose(found.contrast[1], both[0] - both[1], atol=1e-7)
    assert abs(float(found.contrast[1].sum())) < 1e-5


def test_words_and_shares_are_the_ledgers(answered: Answer) -> None:
    said = words(answered)
    assert f"started with {answered.row['start']:.4g}" in said
    assert "All of it was handed back" in said
    shown = flow(answered)
    assert shown.count("<title>") == 8
    for share in answered.shares:
        assert f"{100 * share.skip:.1f} %" in shown
    absorbed = answer(tiny.model(), read(PHOTO), "cat", Question(preset="epsilon"))
    assert "kept a part of it by design: " in words(absorbed)


def test_names_of_a_visitors_choice_are_escaped() -> None:
    nasty = "<img src=x onerror=alert(1)>"
    model = replace(tiny.model(), classes=(nasty,) * 10)
    page = report(answer(model, read(PHOTO), f"{nasty}.jpg", Question()))
    assert "<img src=x" not in page


# -- reports --


def test_a_report_of_a_run_has_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exited:
            cli.main([str(argument) for argument in arguments])
        assert not exited.value.code, capsys.readouterr().err
        return capsys.readouterr().out

    run("explain", PHOTO, "--model", "resnet18", "--weights", "random", "--out", tmp_path / "out")
    folder = tmp_path / "out" / "chelsea"
    found = saved(folder)
    assert found.photo is not None
    assert len(found.shares) == 8
    model = load("resnet18", "random")
    assert torch.allclose(found.stops[-1].map, explain(model, model.prepare(PHOTO)[None]).heatmap[0], atol=1e-9)
    assert run("report", folder) == f"The report is {folder / 'report.html'}.\n"
    page = (folder / "report.html").read_text()
    assert f"Why {found.label}?" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    (folder / "photo.png").unlink()  # one from before there was such a file
    assert saved(folder).photo is None
    run("report", folder, "--out", tmp_path / "bare.html")
    (folder / "photo.png").write_bytes(b"hello")
    with pytest.raises(RelpropError, match=r"photo\.png is no image"):
        saved(folder)
    out = tmp_path / "cat.html"
    run(
        "report",
        PHOTO,
        "--model",
        "resnet18",
        "--weights",
        "random",
        "--target",
        "tabby",
        "--against",
        "lynx",
        "--out",
        out,
    )
    assert "Why tabby" in out.read_text()
    compared = tmp_path / "compare"
    run(
        "compare",
        PHOTO,
        "--model",
        "resnet18",
        "--weights",
        "random",
        "--methods",
        "paper,random",
        "--points",
        2,
        "--out",
        compared,
    )
    run("report", compared)
    assert (compared / "report.html").read_text().count("data:image/png") == 2


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["report", str(tmp_path)], ["report", str(tmp_path / "no.jpg")], ["serve", "--auth", "nobody"]):
        with pytest.raises(SystemExit) as exited:
            cli.main(arguments)
        assert exited.value.code == 2
        assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]) == 1


def test_a_bundle_loads_again(answered: Answer, tmp_path: Path) -> None:
    import zipfile

    from relprop import Explanation

    with zipfile.ZipFile(io.BytesIO(bundle(answered, tmp_path))) as archive:
        archive.extractall(tmp_path / "out")
    again = Explanation.load(tmp_path / "out" / "chelsea")
    assert torch.equal(again.relevance, answered.explanation.relevance)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# -- the JSON interface --


def png(text: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image)


def test_the_interface_answers_what_the_engine_does(desk: Desk, photo: Path) -> None:
    client, model = TestClient(api(desk)), tiny.model()
    sent = {"image": ("photo.png", photo.read_bytes())}
    found = client.post("/explain", files=sent, data={"target": "4", "preset": "released", "levels": "3"}).json()
    e = explain(model, model.prepare(photo)[None], 4, preset="released")
    assert found["target"]["index"] == 4
    assert found["conservation_error"] == pytest.approx(float(e.ledger.error[0]))
    assert [c["index"] for c in found["top"]] == e.output[0].topk(5).indices.tolist()
    heatmap = e.heatmap[0]
    assert (png(found["pictures"]["heatmap"]) == colorize(heatmap, limit=limit(heatmap))).all()
    assert len(np.unique(png(found["pictures"]["quantized"]).reshape(-1, 3), axis=0)) <= 4
    assert [merge["node"] for merge in found["merges"]] == ["add"]
    assert client.get("/models").json()[0] == {"model": "tiny", "weights": ["random"]}
    assert client.get("/health").json()["visits"] == 0
    assert not list(desk.house.visits.iterdir())


def test_the_interface_refuses_in_a_sentence(desk: Desk, photo: Path) -> None:
    client = TestClient(api(desk))
    sent = {"image": ("photo.png", photo.read_bytes())}

    def refused(code: int, said: str, **data: str) -> None:
        answer = client.post("/explain", files=sent, data=data)
        assert answer.status_code == code
        assert said in answer.json()["detail"]

    refused(422, "There is no class 10", target="10")
    refused(422, "has no class names to find '999", target="9" * 5000)
    refused(422, "This server has no model", model="../../etc/passwd")
    refused(422, "This server has no weights", weights="/etc/passwd")
    refused(422, "preset: ", preset="nonsense")
    sent = {"image": ("words.txt", b"hello")}
    refused(422, "words.txt is no image")
    desk.limits = replace(LIMITS, photo=4)
    refused(413, "this server takes")
    assert client.post("/explain", data={"target": "1"}).json() == {"detail": "image: Field required."}
    assert client.get("/visit/guess/bundle.zip").status_code == 422
    assert "/explain" in client.get("/docs").text
    assert not re.findall(r'(?:src|href)="https?:', client.get("/docs").text)


def test_the_interface_keeps_to_its_own_description(desk: Desk, photo: Path) -> None:
    """Requests that schemathesis makes up: every answer is of a kind that the description names."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", api(desk))
    content, tried = photo.read_bytes(), []
    # What is left out: that all bytes are an image, and any text a class, as far as the description goes.

    def check(case: Any) -> None:
        if isinstance(case.body, dict) and len(tried) % 2:
            case.body["image"] = content  # made-up images are never any
        tried.append(case.call_and_validate(excluded_checks=[positive_data_acceptance]).status_code)

    for operation in schema.get_all_operations():
        run = given(case=operation.ok().as_strategy())(check)
        settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))(run)()
    assert {200, 422} <= set(tried)
    assert not [code for code in tried if code >= 500]


# -- the guard --


def asked(address: str, path: str, **options: Any) -> tuple[int, bytes]:
    request = urllib.request.Request(f"{address}{path}", **options)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (ConnectionError, urllib.error.URLError):
        return 0, b""  # the server has hung up


def test_nothing_is_served_from_elsewhere(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(PHOTO.read_bytes())
    with running(*SMALL) as server:
        folder = server.folder
        inside = folder / "uploads" / "mine.png"
        inside.write_bytes(PHOTO.read_bytes())
        (folder / "uploads" / "link.png").symlink_to(secret)
        (folder / "uploads" / "link").symlink_to(tmp_path)
        (folder / "visits" / "other").write_bytes(b"another visitor's")
        file = "/gradio_api/file="
        assert asked(server.address, f"{file}{inside}") == (200, PHOTO.read_bytes())
        for path in (
            *(secret, "/etc/passwd", folder / "uploads" / "link.png", folder / "uploads" / "link" / "secret.png"),
            *(folder / "uploads" / ".." / "visits" / "other", folder / "visits" / "other", folder / ".lock"),
            *(
                "../../../../etc/passwd",
                "..%2f..%2fetc%2fpasswd",
                f"{folder}/uploads/%2e%2e/visits/other",
                "pyproject.toml",
            ),
            *("http://127.0.0.1:9/", "https://example.org/x.png", "file:///etc/passwd", f"{folder}/uploads"),
        ):
            code, content = asked(server.address, f"{file}{path}")
            assert (code, content) == (403, b'{"detail": "There is no such file here."}'), path
        for path in (
            *("/gradio_api/proxy=https://example.org/", "/gradio_api/vibe-code", "/monitoring", "/gradio_api/runs"),
            *("/static/../../../../etc/passwd", "/assets/%2e%2e/%2e%2e/index.html", "/gradio_api/deep_link", "/logout"),
            *("/visit/../health", "/gradio_api/file/etc/passwd", "/gradio_api/call/x/y", "/gradio_api/dev/reload"),
        ):
            assert asked(server.address, path)[0] == 404, path
        # A request of the page must not name a file that was not uploaded, here or anywhere.
        for path in ("/etc/passwd", str(secret), "https://example.org/x.png", str(folder / "uploads" / "link.png")):
            data = {"data": [{"path": path, "meta": {"_type": "gradio.FileData"}}], "fn_index": 0, "session_hash": "x"}
            body = json.dumps(data).encode()
            code, content = asked(server.address, "/gradio_api/queue/join", data=body)
            assert (code, json.loads(content)) == (
                400,
                {"detail": "This request names a file that was not uploaded here."},
            )
        deep = b'{"data": ' + b"[" * 9999 + b"]" * 9999 + b"}"
        assert asked(server.address, "/gradio_api/queue/join", data=deep)[0] == 400
        # One who leaves in the middle of an upload is no error.
        with socket.create_connection(("127.0.0.1", urlsplit(server.address).port or 0)) as left:
            head = "POST /gradio_api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n"
            left.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n".encode())
            time.sleep(0.5)
        # Nor may a page of another site, or one of another name for this address.
        other = {"Sec-Fetch-Site": "cross-site"}
        assert asked(server.address, "/gradio_api/queue/join", data=b"{}", headers=other)[0] == 403
        for origin, code in (("http://evil.example", 403), ("null", 403), (server.address, 422)):
            assert asked(server.address, "/explain", data=b"", headers={"Origin": origin})[0] == code
        assert asked(server.address, "/health", headers={"Host": "evil.example"})[0] == 403
        assert (
            asked(server.address, "/health", headers={"Host": f"localhost:{server.address.rpartition(':')[2]}"})[0]
            == 200
        )
        sent = urllib.request.urlopen(server.address)
        assert sent.headers["content-security-policy"].startswith("default-src 'self'")
    assert not folder.exists()
    assert "Traceback" not in server.said


def multipart(content: bytes) -> tuple[bytes, dict[str, str]]:
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    return head + content + b"\r\n--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}


def test_a_server_with_a_password_stays_small(tmp_path: Path, photo: Path) -> None:
    (tmp_path / "password").write_text("me:sesame\n")
    options = ("--auth", f"@{tmp_path / 'password'}", "--waiting", 1, "--max-photo", 1, "--max-checkpoint", 0)
    body, kind = multipart(photo.read_bytes())
    key = {"Authorization": f"Basic {base64.b64encode(b'me:sesame').decode()}", **kind}
    with running(*SMALL, *options) as server:
        for path in (
            "/",
            "/health",
            "/docs",
            "/config",
            "/gradio_api/info",
            "/visit/x/bundle.zip",
            "/gradio_api/file=x",
        ):
            assert asked(server.address, path)[0] == 401
            wrong = {"Authorization": f"Basic {base64.b64encode(b'me:wrong').decode()}"}
            assert asked(server.address, path, headers=wrong)[0] == 401
        assert asked(server.address, "/health", headers=key)[0] == 200
        assert asked(server.address, "/explain", data=body, headers=kind)[0] == 401

        # Too much: said beforehand, or noticed on the way.
        large, _ = multipart(bytes(4_000_000))
        assert asked(server.address, "/explain", data=large, headers=key)[0] == 413
        code = asked(
            server.address, "/explain", data=iter([large] * 2), headers={**key, "Transfer-Encoding": "chunked"}
        )[0]
        assert code in (0, 400)

        # Too many: some wait for their turn, and the others are told so.
        answers: list[tuple[int, bytes]] = []

        def ask() -> None:
            answers.append(asked(server.address, "/explain", data=body, headers=key))

        ask()
        crowd = [threading.Thread(target=ask) for _ in range(8)]
        for visitor in crowd:
            visitor.start()
        for visitor in crowd:
            visitor.join()
        codes = [code for code, _ in answers]
        assert set(codes) == {200, 503}
        assert b"The server is busy, 1 requests are waiting" in next(c for code, c in answers if code == 503)

        # Many, one after another: memory does not grow with them.
        def ask_often(times: int) -> float:
            for _ in range(times):
                assert asked(server.address, "/explain", data=body, headers=key)[0] == 200
            return server.memory

        before = ask_often(15)
        after = ask_often(25)
        assert after - before < 25, (before, after)

        # Ctrl-C is the way to end it, and no error; that a page is open is nothing to tell.
        page = urllib.request.Request(f"{server.address}/gradio_api/heartbeat/x", headers=key)
        with urllib.request.urlopen(page, timeout=60):
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(60) == 0
    assert "Traceback" not in server.said
