"""A real S3 server for tests: moto's, in a process of its own, with an empty bucket."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "bucket"


@contextmanager
def object_store(patch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Runs the server; the environment names it, as it would name a real one. Skips where there is none to run."""
    pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stdout)
            endpoint = next(match[0] for match in found if match)
            for name, value in {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
            }.items():
                patch.setenv(name, value)
            with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=20):
                yield server
        finally:
            server.kill()
