"""The store in memory, asked by TensorStore's own drivers."""

import time

import pytest
import tensorstore as ts
from servers.object_server import Fault, ObjectServer

pytest_plugins = ["servers.fixtures"]

RETRIES = {"max_retries": 10, "initial_delay": "2ms", "max_delay": "20ms"}


@pytest.fixture
def spec(store_url: str, object_server: ObjectServer) -> dict:
    scheme, _, bucket = store_url.partition("://")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": "x/"}
    region = {"endpoint": object_server.s3_endpoint, "aws_region": "us-east-1"}
    return {"driver": "s3", "bucket": bucket, "path": "x/"} | region


@pytest.fixture
def context() -> ts.Context:
    return ts.Context({"s3_request_retries": RETRIES, "gcs_request_retries": RETRIES})


@pytest.fixture
def store(spec: dict, context: ts.Context) -> ts.KvStore:
    return ts.KvStore.open(spec, context=context).result()


@pytest.fixture
def many(object_server: ObjectServer, bucket: str) -> dict[str, bytes]:
    """Sixty objects, by their name in the store."""
    values = {f"{k:04}": f"value {k}".encode() for k in range(60)}
    object_server.objects[bucket] = {f"x/{name}": value for name, value in values.items()}
    return values


def read_all(store: ts.KvStore, names: list[str]) -> list[bytes]:
    pending = [store.read(name) for name in names]
    return [each.result().value for each in pending]


def refused_by(store: ts.KvStore, name: str) -> str:
    with pytest.raises(ValueError, match=r"^[A-Z_]+: ") as caught:
        store.read(name).result()
    return str(caught.value)


@pytest.mark.parametrize("name", ["plain", "a/b/c", "with space", "a+b&c=d?e#f%2Fg", "ü/日本", "<&'\">", "..."])
def test_what_was_written_is_read_and_listed(store, object_server, bucket, name):
    store.write(name, b"value").result()
    assert object_server.objects[bucket] == {f"x/{name}": b"value"}
    assert store.read(name).result().value == b"value"
    assert store.list().result() == [name.encode()]


def test_an_object_that_is_not_there_is_missing(store):
    assert store.read("nothing").result().state == "missing"


@pytest.mark.parametrize("span", [slice(2, 5), slice(2, None), slice(-3, None), slice(0, 10)])
def test_a_range_is_what_is_asked_for_and_sent(store, object_server, span):
    store["digits"] = b"0123456789"
    object_server.clear_log()
    assert store.read("digits", byte_range=span).result().value == b"0123456789"[span]
    assert sum(each.sent for each in object_server.log) == len(b"0123456789"[span])


def test_a_listing_comes_in_pages(store, object_server, bucket):
    names = sorted(f"{k:x}/{k}" for k in range(1500))
    object_server.objects[bucket] = {f"x/{name}": b"" for name in names} | {"w/before": b"", "y/after": b""}
    assert store.list().result() == [name.encode() for name in names]
    assert [each.is_list for each in object_server.log] == [True, True]


def test_a_range_of_names_is_listed_and_deleted(store, object_server, bucket, many):
    span = ts.KvStore.KeyRange("0010", "0020")
    assert store.list(span).result() == [f"{k:04}".encode() for k in range(10, 20)]
    store.delete_range(span).result()
    assert sorted(object_server.objects[bucket]) == [f"x/{k:04}" for k in range(60) if not 10 <= k < 20]


def test_a_write_to_what_has_changed_is_refused(store, spec, context, object_server):
    first = store.write("name", b"first").result()
    store.write("name", b"second").result()
    if spec["driver"] == "s3":
        store = ts.KvStore.open(spec | {"use_conditional_write": True}, context=context).result()
    object_server.clear_log()
    store.write("name", b"third", if_equal=first.generation).result()
    assert [each.status for each in object_server.log] == [412]
    store.write("name", b"third", if_equal=b"\x02").result()  # only where there is nothing
    assert [each.status for each in object_server.log] == [412, 412]
    assert store["name"] == b"second"


def test_what_is_cached_is_asked_for_again_but_not_sent(store, object_server):
    seen = store.write("name", b"value").result().generation
    object_server.clear_log()
    assert store.read("name", if_not_equal=seen).result().state == "unspecified"
    assert [(each.status, each.sent) for each in object_server.log] == [(304, 0)]


def test_ocdbt_is_written_and_read(spec, context, object_server):
    base = {"driver": "ocdbt", "base": spec}
    values = {f"key {k}": b"v" * (100 * k) for k in range(40)}
    with ts.Transaction() as transaction:
        written = ts.KvStore.open(base, context=context).result().with_transaction(transaction)
        for name, value in values.items():
            written[name] = value
    object_server.clear_log()
    found = ts.KvStore.open(base, context=ts.Context(context.spec)).result()
    assert dict(zip(values, read_all(found, list(values)), strict=True)) == values
    assert object_server.requests("manifest.ocdbt")


@pytest.mark.parametrize("what", [429, 500, 503, "reset", "cut"])
def test_what_goes_wrong_now_and_then_is_asked_for_again(store, object_server, many, what):
    fault = Fault(what, every=5)
    object_server.faults = [fault]
    assert read_all(store, list(many)) == list(many.values())
    assert len(object_server.log) == len(many) + fault.struck
    assert fault.struck >= len(many) // 5


def test_what_always_goes_wrong_is_given_up(store, object_server, many):
    object_server.faults = [Fault(503)]
    assert "All 10 retry attempts failed" in refused_by(store, "0001")
    assert [each.status for each in object_server.log] == [503] * 11


def test_a_flipped_bit_arrives(store, object_server, many):
    object_server.faults = [Fault("flip", key="0007", times=1)]
    assert read_all(store, ["0006", "0008"]) == [many["0006"], many["0008"]]
    assert [a ^ b for a, b in zip(store["0007"], many["0007"], strict=True) if a != b] == [1]
    assert store["0007"] == many["0007"]


def test_what_is_forbidden_is_refused_at_once(store, object_server, bucket, many):
    object_server.forbidden.add(f"{bucket}/x/0003")
    assert refused_by(store, "0003").startswith("PERMISSION_DENIED")
    assert [each.status for each in object_server.log] == [403]
    assert store["0004"] == many["0004"]


def test_listings_alone_may_be_refused(store, spec, object_server, bucket, many):
    object_server.forbidden.add(f"{bucket}/?")
    if spec["driver"] == "gcs":
        assert store.list().result() == []
    else:
        with pytest.raises(ValueError, match=r"^PERMISSION_DENIED"):
            store.list().result()
    assert store["0004"] == many["0004"]


def test_a_bucket_that_is_not_there(store, spec, object_server, bucket):
    del object_server.objects[bucket]
    assert store.read("name").result().state == "missing"
    if spec["driver"] == "gcs":  # what the driver makes of 404
        assert store.list().result() == []
    else:
        with pytest.raises(ValueError, match=r"^NOT_FOUND: .*NoSuchBucket"):
            store.list().result()
    assert [each.status for each in object_server.log] == [404, 404]


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_listing_that_is_refused_on_its_way_is_short_on_gcs(store, spec, object_server, bucket, status):
    object_server.objects[bucket] = {f"x/{k:04}": b"" for k in range(1500)}
    object_server.faults = [Fault(status, every=2)]
    if spec["driver"] == "gcs":  # a trap of TensorStore's driver: no error, only fewer names
        assert len(store.list().result()) == 1000
    else:
        with pytest.raises(ValueError, match=rf"http_response_code='{status}'"):
            store.list().result()


def test_a_request_that_hangs_ends_with_the_reset(store, object_server, many):
    object_server.faults = [Fault("hang", times=1)]
    pending = store.read("0001")
    with pytest.raises(TimeoutError):
        pending.result(timeout=0.3)
    assert [each.status for each in object_server.log] == [0]
    object_server.reset()
    assert pending.result().value == many["0001"]


def test_what_is_asked_about_a_retired_bucket_is_not_logged(store, object_server, bucket):
    object_server.faults = [Fault(503, times=1)]
    object_server.retire(bucket)
    assert store.read("name").result().state == "missing"
    assert not object_server.log
    assert not object_server.faults[0].struck


def test_requests_at_once_are_counted(store, object_server, many):
    object_server.latency = 0.05
    begin = time.monotonic()
    read_all(store, list(many)[:8])
    assert object_server.most_at_once > 1
    assert time.monotonic() - begin < 8 * 0.05


def test_a_folder_is_put(store, object_server, bucket, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_bytes(b"value")
    object_server.put_tree(bucket, "x", tmp_path)
    assert store["a/b/c"] == b"value"
