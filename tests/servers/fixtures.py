"""Fixtures for tests with `gs://` and `s3://`: a module that wants them says `pytest_plugins = ["servers.fixtures"]`.

TensorStore reads where Google's store is once in the life of a process. So there is one server in each, from before the
first test on, and every test has a bucket of its own there.
"""

import os
from collections.abc import Iterator
from itertools import count

import pytest
from servers.object_server import ObjectServer
from servers.real import StoreBucket, fake_gcs_server, moto

_SERVER: list[ObjectServer] = []
_NUMBERS = count(1)


def pytest_configure() -> None:
    """Start the server, while tests are collected."""
    _SERVER.append(ObjectServer())
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = _SERVER[0].gcs_endpoint


def pytest_unconfigure() -> None:
    """End it."""
    _SERVER.pop().close()


@pytest.fixture
def object_server() -> Iterator[ObjectServer]:
    """The server of this process, its log empty and without faults."""
    server = _SERVER[0]
    server.reset()
    yield server
    server.reset()


@pytest.fixture
def bucket(object_server: ObjectServer) -> Iterator[str]:
    """An empty bucket, of both stores."""
    name = f"bucket-{next(_NUMBERS)}"
    object_server.objects[name] = {}
    yield name
    object_server.retire(name)


@pytest.fixture
def s3_env(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings that lead `s3://` to the server."""
    point_s3_at(object_server.s3_endpoint, monkeypatch)


def point_s3_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead `s3://` to a server that takes any credentials."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@pytest.fixture(params=["gs", "s3"])
def store_url(request: pytest.FixtureRequest, bucket: str, s3_env: None) -> str:
    """`gs://bucket`, then `s3://bucket`, where `bucket` is an empty one."""
    return f"{request.param}://{bucket}"


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """moto, started when it is first wanted, or the test is skipped."""
    with moto() as url:
        yield url


@pytest.fixture(scope="session")
def fake_gcs_url() -> Iterator[str]:
    """fake-gcs-server, likewise."""
    with fake_gcs_server() as url:
        yield url


@pytest.fixture
def moto_bucket(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> StoreBucket:
    """An empty bucket of moto's; `s3://` leads there."""
    point_s3_at(moto_url, monkeypatch)
    return StoreBucket.create("s3", f"moto-{next(_NUMBERS)}", moto_url)


@pytest.fixture
def fake_gcs_bucket(fake_gcs_url: str, object_server: ObjectServer) -> Iterator[StoreBucket]:
    """An empty bucket of fake-gcs-server's, to which the server of this process passes on what is asked."""
    made = StoreBucket.create("gs", f"fake-{next(_NUMBERS)}", fake_gcs_url)
    object_server.forward[made.name] = fake_gcs_url
    yield made
    del object_server.forward[made.name]


@pytest.fixture(params=["gs", "s3"])
def real_bucket(request: pytest.FixtureRequest) -> StoreBucket:
    """An empty bucket of fake-gcs-server, then of moto."""
    return request.getfixturevalue({"gs": "fake_gcs_bucket", "s3": "moto_bucket"}[request.param])
