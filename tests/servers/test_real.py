"""The store in memory answers as those do that others wrote."""

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree

import pytest
import tensorstore as ts
from servers.object_server import ObjectServer
from servers.real import StoreBucket, ask

pytest_plugins = ["servers.fixtures"]

RETRIES = {"max_retries": 2, "initial_delay": "5ms", "max_delay": "20ms"}
NAMES = ["a", "a/b", "a/b/c", "a0", "b c+d&e", "ü"]


def opened(scheme: str, bucket: str, endpoint: str) -> ts.KvStore:
    spec = {"driver": {"gs": "gcs", "s3": "s3"}[scheme], "bucket": bucket, "path": "x/"}
    if scheme == "s3":
        spec |= {"endpoint": endpoint, "aws_region": "us-east-1", "use_conditional_write": True}
    context = ts.Context({"s3_request_retries": RETRIES, "gcs_request_retries": RETRIES})
    return ts.KvStore.open(spec, context=context).result()


@pytest.fixture
def both(real_bucket: StoreBucket, object_server: ObjectServer, bucket: str) -> list[ts.KvStore]:
    """The same objects in the store in memory and in the other one."""
    stores = [
        opened(real_bucket.scheme, name, endpoint)
        for name, endpoint in ((bucket, object_server.s3_endpoint), (real_bucket.name, real_bucket.endpoint))
    ]
    for store in stores:
        for name in NAMES:
            store[name] = name.encode() * 5
    return stores


def outcome(call: Callable[[], Any]) -> Any:
    """What comes back, or the kind of error."""
    try:
        found = call()
    except ValueError as error:
        return str(error).partition(":")[0]
    return (found.state, found.value) if isinstance(found, ts.KvStore.ReadResult) else found


def same(both: list[ts.KvStore], call: Callable[[ts.KvStore], Any]) -> Any:
    ours, theirs = (outcome(lambda store=store: call(store)) for store in both)
    assert ours == theirs
    return ours


def test_listings(both):
    for first in ("", "a/", "a/b", "b", "z"):
        for end in ("", "a0", "b", "zz"):
            span = ts.KvStore.KeyRange(first, end)
            same(both, lambda store, span=span: sorted(store.list(span).result()))


@pytest.mark.parametrize("name", ["a", "b c+d&e", "nothing"])
def test_reads(both, name):
    for span in (None, slice(0, 3), slice(2, None), slice(-2, None), slice(3, 99), slice(99, 100), slice(0, 0)):
        same(both, lambda store, span=span: store.read(name, byte_range=span).result())


def test_conditions(both, real_bucket):
    if real_bucket.scheme == "gs":
        pytest.skip("fake-gcs-server ignores conditions")
    same(both, written_with_conditions)
    assert same(both, lambda store: store["new"]) == b"2"
    assert same(both, read_twice) == ("unspecified", b"")


def written_with_conditions(store: ts.KvStore) -> None:
    first = store.write("new", b"1", if_equal=b"\x02").result().generation  # where there is nothing
    store.write("new", b"2", if_equal=first).result()
    store.write("new", b"3", if_equal=first).result()
    store.write("new", b"4", if_equal=b"\x02").result()


def read_twice(store: ts.KvStore) -> Any:
    return store.read("new", if_not_equal=store.read("new").result().stamp.generation).result()


def test_deletions(both):
    for store in both:
        store.delete_range(ts.KvStore.KeyRange("a/", "a0")).result()
    assert same(both, lambda store: sorted(store.list().result())) == [b"a", b"a0", b"b c+d&e", "ü".encode()]


@pytest.mark.parametrize("delimiter", ["", "/"])
@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_pages_of_names(both, real_bucket, object_server, bucket, delimiter, limit):
    scheme = real_bucket.scheme
    ours = list(pages(scheme, object_server.url, bucket, delimiter, limit))
    theirs = list(pages(scheme, real_bucket.endpoint, real_bucket.name, delimiter, limit))
    assert joined(ours) == joined(theirs)
    if scheme == "s3" or not delimiter:  # fake-gcs-server does not count groups, Google's store and S3 do
        assert ours == theirs


def joined(found: list[tuple[list[str], list[str]]]) -> list[str]:
    return sorted(name for names, groups in found for name in (*names, *groups))


def pages(scheme: str, url: str, bucket: str, delimiter: str, limit: int) -> Iterator[tuple[list[str], list[str]]]:
    """Names below `x/`, and what they begin with up to the delimiter, page by page."""
    query = {"prefix": "x/", "delimiter": delimiter} | ({} if scheme == "gs" else {"list-type": "2"})
    size, token_of = ("maxResults", "pageToken") if scheme == "gs" else ("max-keys", "continuation-token")
    base = f"{url}/storage/v1/b/{bucket}/o" if scheme == "gs" else f"{url}/{bucket}"
    token = None
    while token is None or token:
        asked = query | {size: str(limit)} | ({token_of: token} if token else {})
        answer = ask("GET", f"{base}?{urlencode(asked)}")
        names, groups, token = (json_page if scheme == "gs" else xml_page)(answer)
        yield names, groups


def json_page(answer: bytes) -> tuple[list[str], list[str], str]:
    found = json.loads(answer)
    return [item["name"] for item in found.get("items", ())], found.get("prefixes", []), found.get("nextPageToken", "")


def xml_page(answer: bytes) -> tuple[list[str], list[str], str]:
    found = ElementTree.fromstring(answer)
    names = [each.text for each in found.findall("{*}Contents/{*}Key")]
    groups = [each.text for each in found.findall("{*}CommonPrefixes/{*}Prefix")]
    return names, groups, found.findtext("{*}NextContinuationToken", "")


def test_a_bucket_that_is_not_there(real_bucket, object_server, monkeypatch):
    monkeypatch.setitem(object_server.forward, "missing-there", real_bucket.endpoint)
    here = opened(real_bucket.scheme, "missing-here", object_server.s3_endpoint)
    there = opened(real_bucket.scheme, "missing-there", real_bucket.endpoint)
    same([here, there], lambda store: store.list().result())
    same([here, there], lambda store: store.read("a").result())


def test_a_folder_is_uploaded(real_bucket, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"value")
    real_bucket.put_tree("x", tmp_path)
    assert opened(real_bucket.scheme, real_bucket.name, real_bucket.endpoint)["a/b"] == b"value"
