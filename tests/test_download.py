"""MNIST comes through torchvision's downloader, from a server on this machine that counts."""

import collections
import gzip
import hashlib
import http.server
import socket
import threading

import pytest
from conftest import ROOT, errors, launch

# Run the script as it is, but for the place that torchvision downloads from.
WRAPPER = """
import os, runpy, sys
from torchvision.datasets import MNIST

MNIST.mirrors = [os.environ["MIRROR"]]
MNIST.resources = [tuple(item.split("=")) for item in os.environ["RESOURCES"].split(",")]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def wrapper(tmp_path):
    path = tmp_path / "wrapper.py"
    path.write_text(WRAPPER)
    return path


def test_each_file_is_downloaded_once(wrapper, small_mnist, tmp_path):
    files = {f"{path.name}.gz": gzip.compress(path.read_bytes()) for path in (small_mnist / "MNIST" / "raw").iterdir()}
    requests = collections.Counter()

    class Mirror(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.strip("/")
            requests[name] += self.headers["Method"] != "HEAD"  # torchvision first asks for redirects, with GET too
            self.send_response(200)
            self.send_header("Content-Length", str(len(files[name])))
            self.end_headers()
            self.wfile.write(files[name])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        "MIRROR": f"http://127.0.0.1:{server.server_port}/",
        "RESOURCES": ",".join(f"{name}={hashlib.md5(data).hexdigest()}" for name, data in files.items()),
        "no_proxy": "127.0.0.1",
    }
    try:
        for _ in range(2):
            flags = ("--data-dir", tmp_path / "data", "--epochs", 0)
            result = launch(wrapper, ROOT / "train_ddp.py", *flags, nproc=3, **env)
            assert result.returncode == 0, result.stderr
            assert "of 101 test images" in result.stdout
            assert requests == dict.fromkeys(files, 1)
            assert "\r" not in result.stderr
    finally:
        server.shutdown()


def test_a_firewall_that_swallows_everything(wrapper, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, but never answers
        env = {"MIRROR": f"http://127.0.0.1:{silent.getsockname()[1]}/", "RESOURCES": "train.gz=0", "no_proxy": "*"}
        result = launch(wrapper, ROOT / "train_manual_ddp.py", "--data-dir", tmp_path / "data", timeout=60, **env)
    (line,) = errors(result)
    assert "timed out" in line
    assert "put the files there (train.gz;" in line
    assert "--dataset synthetic" in line
