"""Shards in a store: S3 and HTTP, by servers on the loopback address, serve what the same shards on a disk do."""

import contextlib
import io
import re
import tarfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from multiprocessing import get_context

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.cli.main import main
from vitlab.data import Packed, WebDataset

REFUSED = r"^s3://bucket/other\S* cannot be read: .*Forbidden"
if version("s3fs") < "2026.9":  # earlier ones say of a place that one may not list that it is not there
    REFUSED += "|^there is no s3://bucket/other$"
SETTINGS = {"batch_size": 4, "img_size": 16, "augment": "crop-flip", "repeats": 1}


class Front:
    """What stands before the server: it counts the ranges that are asked for, and does the next of ``faults``."""

    def __init__(self, app):
        self.app, self.faults, self.asked = app, [], []

    def __call__(self, environ, start_response):
        if "HTTP_RANGE" not in environ or environ["REQUEST_METHOD"] != "GET":
            return self.app(environ, start_response)
        self.asked.append(environ["PATH_INFO"])
        fault = self.faults.pop(0) if self.faults else ""
        if fault.isdecimal():
            start_response(f"{fault} Broken", [("Content-Length", "0")])
            return [b""]
        if fault == "slow":
            time.sleep(6.0)
        if fault not in ("short", "cut"):
            return self.app(environ, start_response)
        told = []
        body = b"".join(self.app(environ, lambda *given, **_: told.append(given[:2])))[:-7]
        headers = [(k, v) for k, v in told[0][1] if k.lower() != "content-length"]
        start_response(told[0][0], [*headers, ("Content-Length", str(len(body) + 7 * (fault == "cut")))])
        return [body]


@pytest.fixture(scope="module")
def server():
    """A server of S3 with a bucket."""
    pytest.importorskip("s3fs")
    moto_server = pytest.importorskip("moto.server")  # here, as it takes a second to import
    patch = pytest.MonkeyPatch()
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    front = server._server.app = Front(server._server.app)
    conf = {
        "endpoint_url": f"http://{host}:{port}",
        "key": "k",
        "secret": "s",
        "config_kwargs": {"read_timeout": 5, "connect_timeout": 60},
    }
    patch.setitem(fsspec.config.conf, "s3", conf)
    patch.setattr("vitlab.data.files.ranges._WAITS", (0.0, 0.0, 0.0))
    fsspec.filesystem("s3").mkdir("bucket")
    yield front
    patch.undo()
    server.stop()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three shards for training and one for validation, and a packed folder, on disk."""
    here, rng = tmp_path_factory.mktemp("stored"), np.random.default_rng(0)
    for name, n in (("train-0", 9), ("train-1", 9), ("train-2", 9), ("val-0", 5)):
        with tarfile.open(here / f"{name}.tar", "w") as tar:
            for i in range(n):
                image = Image.fromarray(rng.integers(0, 256, (20 + i, 24, 3), dtype=np.uint8))
                image.save(photo := io.BytesIO(), "PNG")
                place = here / "photos" / "ab"[i % 2] / f"{name}-{i}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(photo.getvalue())
                for suffix, data in (("png", photo.getvalue()), ("cls", str(i % 2).encode())):
                    (entry := tarfile.TarInfo(f"{i:04}.{suffix}")).size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    assert main(["pack", str(here / "photos"), str(here / "packed"), "--size=22", "--num_workers=0"]) == 0
    return here


def _files(here):
    return {str(file.relative_to(here)): file for file in [*here.glob("*.tar"), *(here / "packed").iterdir()]}


@pytest.fixture(scope="module")
def stored(server, made):
    """The same in the bucket of S3."""
    for name, file in _files(made).items():
        fsspec.filesystem("s3").put_file(str(file), f"bucket/{name}")
    return made


class Faulty(BaseHTTPRequestHandler):
    """Serve byte ranges of files, with the next of `faults` in place of an answer."""

    files: dict[str, bytes]
    faults: list[str]
    slow = 4.0  # seconds

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self.path not in self.files:
            return self.send_error(404)
        content, asked = self.files[self.path], self.headers.get("Range")
        start, end = 0, len(content)
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or end) + 1, end)
        fault = self.faults.pop(0) if asked and self.faults else ""
        if fault == "slow":
            time.sleep(self.slow)
        body = content[start:end]
        self.send_response(500 if fault == "500" else 206 if asked else 200)
        body = b"" if fault == "500" else body[:-7] if fault in ("short", "cut") else body
        self.send_header("Content-Length", str(len(body) + 7 * (fault == "cut")))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        with contextlib.suppress(OSError):  # a client that has gone
            self.wfile.write(body if self.command == "GET" else b"")


@pytest.fixture
def http(made, monkeypatch, request):
    """A server of HTTP with these files, whose client waits for 3 s where the server is slow; else a machine may be."""
    aiohttp = pytest.importorskip("aiohttp")
    seconds = 3 if "[slow" in request.node.name else 100
    timeout = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=seconds)}}
    monkeypatch.setitem(fsspec.config.conf, "http", timeout)
    monkeypatch.setattr("vitlab.data.files.ranges._WAITS", (0.0, 0.0, 0.0))
    files = {f"/{name}": file.read_bytes() for name, file in _files(made).items()}
    handler = type("Handler", (Faulty,), {"files": files, "faults": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.faults
    server.shutdown(), server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _no_faults(request):
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.faults.clear()
        server.asked.clear()


def _shards(where, num_workers=0, val="val-*.tar", **settings):
    torch.manual_seed(1)
    data = WebDataset(f"{where}/train-{{0..2}}.tar", f"{where}/{val}", num_workers=num_workers, **SETTINGS | settings)
    data.setup("fit")
    return data


def _packed(where, num_workers=0, **settings):
    torch.manual_seed(1)
    data = Packed(f"{where}/packed", num_workers=num_workers, **SETTINGS | settings)
    data.setup("fit")
    return data


def _epoch(data, epoch=0, start=0):
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    loader.load_state_dict({"epoch": epoch, "batches": start})
    return [(images.clone(), classes, step.indices.tolist()) for images, classes, step in loader]


def _equal(first, second):
    return len(first) == len(second) > 0 and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2] for a, b in zip(first, second, strict=True)
    )


def _of_process(given):
    kind, where, rank, settings = given
    data = {"shards": _shards, "packed": _packed}[kind](where, num_workers=2, **settings)
    data._place = lambda: (rank, 2)
    return _epoch(data, epoch=1)


def _two_processes(kind, where, **settings):
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        return list(pool.map(_of_process, [(kind, where, rank, settings) for rank in (0, 1)]))


@pytest.mark.rare  # a server and processes; HTTP below is a store, too
@pytest.mark.parametrize("kind", ["shards", "packed"])
def test_shards_in_s3_give_the_batches_of_those_on_the_disk(kind, stored, server):
    make = {"shards": _shards, "packed": _packed}[kind]
    local, remote = make(stored), make("s3://bucket")
    clean = _epoch(local)
    server.asked.clear()
    assert _equal(clean, _epoch(remote)) and 0 < len(server.asked) < 27  # neighbors come together
    assert _equal(clean, _epoch(make("s3://bucket", num_workers=2)))
    assert _equal(_epoch(local, 1)[3:], _epoch(remote, 1, 3))
    assert local.statistics() == remote.statistics()
    assert [x.tolist() for _, x, _ in local.val_dataloader()] == [x.tolist() for _, x, _ in remote.val_dataloader()]
    ranks = []
    for rank in (0, 1):
        local._place = lambda rank=rank: (rank, 2)
        ranks.append(_epoch(local, 1))
    assert all(map(_equal, ranks, _two_processes(kind, "s3://bucket")))


FAULTS = {
    "500": "Internal Server Error",
    "503": "Service Unavailable",
    "short": r"\d+ of \d+ bytes",
    "cut": "Not enough data",
    "slow": "Read timeout",
}


@pytest.mark.rare  # clients of S3 wait, too
@pytest.mark.parametrize("kind", ["shards", "packed"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_s3_change_no_batch_and_are_reported(kind, fault, stored, server):
    data = {"shards": _shards, "packed": _packed}[kind]("s3://bucket")
    clean = _epoch(data)
    server.faults[:] = [fault]
    with pytest.warns(UserWarning, match=r"(tar|bin): 1 of \d+ ranges failed, attempt 2 of 4 in 0 s") as told:
        assert _equal(clean, _epoch(data))
    line = str(told[0].message)
    assert len(told) == 1 and "\n" not in line and re.search(FAULTS[fault], line) and not server.faults, line
    server.faults[:] = [fault] * 1000
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"bucket|photos|png") as stopped:
        _epoch(data)
    assert "\n" not in str(stopped.value) and re.search(FAULTS[fault], str(stopped.value)), stopped.value


@pytest.mark.rare
def test_a_cache_serves_the_next_epoch_and_two_processes_keep_to_its_budget(stored, server, tmp_path, monkeypatch):
    clean = _epoch(_shards(stored))
    data = _shards("s3://bucket", cache_gb=1)
    assert _equal(clean, _epoch(data))
    server.asked.clear()
    assert _equal(clean, _epoch(data)) and not server.asked
    assert _equal(clean, _epoch(_shards("s3://bucket", cache_gb=1)))  # of another run
    assert len(server.asked) == 0
    kept = list((tmp_path / ".cache" / "ranges").glob("*/*"))
    for file in kept[:5]:
        file.write_bytes(file.read_bytes()[:-3])  # as after a power failure
    assert _equal(clean, _epoch(data)) and 0 < len(server.asked) <= 5
    monkeypatch.setattr("vitlab.data.files.disk_cache._UNUSED", 0.0)
    few = 20_000 / 1e9  # of about 50,000 bytes
    assert sum(file.stat().st_size for file in kept) > 2e4
    ranks = _two_processes("packed", "s3://bucket", cache_gb=few)
    assert all(map(_equal, _two_processes("packed", str(stored)), ranks))
    left = sum(file.stat().st_size for file in (tmp_path / ".cache" / "ranges").glob("*/*"))
    assert 10_000 < left <= 20_000 and int((tmp_path / ".cache" / "ranges" / "bytes").read_text()) >= left


KINDS = {"shards": lambda where, **how: _shards(where, val="val-0.tar", **how), "packed": _packed}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_shards_over_http_give_the_batches_of_those_on_the_disk(kind, made, http):
    address, _ = http
    local, remote = KINDS[kind](made), KINDS[kind](address)
    assert _equal(_epoch(local), _epoch(remote)) and local.statistics() == remote.statistics()
    assert _equal(_epoch(local, 1)[3:], _epoch(KINDS[kind](address, num_workers=2), 1, 3))
    for rank in (0, 1):
        local._place = remote._place = lambda rank=rank: (rank, 2)
        assert _equal(_epoch(local, 1), _epoch(remote, 1))
    with pytest.raises(ValueError, match=rf"^there is no {address}/no/index.npz$"):
        Packed(f"{address}/no")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["500", "short", "cut", pytest.param("slow", marks=pytest.mark.rare)])  # waits
def test_faults_of_http_change_no_batch_and_are_reported(kind, fault, made, http):
    address, faults = http
    data = KINDS[kind](address)
    clean = _epoch(data)
    faults[:] = [fault]
    with pytest.warns(UserWarning, match=r"(tar|bin): 1 of \d+ ranges failed, attempt 2 of 4 in 0 s") as told:
        assert _equal(clean, _epoch(data))
    assert len(told) == 1 and "\n" not in str(told[0].message) and not faults
    faults[:] = [fault] * 1000
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"tar|photos|png") as stopped:
        _epoch(data)
    assert "\n" not in str(stopped.value), stopped.value
    assert (
        1000 - len(faults) <= 24
    )  # four attempts at each range of a batch, then few: a lost store ends a training soon


@pytest.mark.slow
def test_each_attempt_at_a_range_is_reported_with_its_reason(made, http):
    address, faults = http
    data = _packed(address)
    clean = _epoch(data)
    faults[:] = ["500", "cut", "short"]
    with pytest.warns(UserWarning, match=r"bin: 1 of 1 ranges failed, attempt [234] of 4 in 0 s") as told:
        assert _equal(clean, _epoch(data))
    found = [re.search(r"attempt (\d) of 4 in 0 s \((\w+)", str(warning.message)).groups() for warning in told]
    assert found == [("2", "ClientResponseError"), ("3", "ClientPayloadError"), ("4", "OSError")]
    assert not faults and not data.unreadable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, "cannot be read: the server answers 403 Forbidden"),
        (404, "^there is no http"),
        (None, "cannot be read: Cannot"),
    ],
)
def test_a_refusal_of_a_store_is_told_apart_from_a_missing_shard(status, message):
    pytest.importorskip("aiohttp")

    class Refusing(Faulty):
        def do_GET(self):
            self.send_error(status)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{http.server_port}/a.tar"
    if status is None:
        http.shutdown(), http.server_close()
    with pytest.raises(ValueError, match=message) as told:
        WebDataset(train=address, img_size=8)
    assert address in str(told.value) and "\n" not in str(told.value)
    if status is not None:
        http.shutdown(), http.server_close()
    thread.join()


def _refusing(environ, start_response):
    start_response("403 Forbidden", [("Content-Length", "0")])
    return [b""]


@pytest.mark.slow
def test_a_store_that_refuses_or_lacks_something_is_one_line(stored, server, monkeypatch):
    fsspec.filesystem("s3").copy("bucket/packed/images-00000.bin", "bucket/half/images-00000.bin")
    lacking = {
        "no.tar": "^there is no s3://bucket/no.tar$", "no-*.tar": r"^there is no s3://bucket/no-\*.tar$",
        "no": "^there is no s3://bucket/no/index.npz$", "half": "half has shards and no index.npz: copy it there, too$",
    }  # fmt: skip
    for name, message in lacking.items():
        with pytest.raises(ValueError, match=message):
            WebDataset(f"s3://bucket/{name}") if name.endswith("tar") else Packed(f"s3://bucket/{name}")
    monkeypatch.setattr(server, "app", _refusing)
    for make in (WebDataset, Packed):
        with pytest.raises(ValueError, match=REFUSED):
            make("s3://bucket/other")
