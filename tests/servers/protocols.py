"""What S3 and Google Cloud Storage say, as far as TensorStore's drivers ask: a request, the objects, the answer."""

import http.client
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000  # names that one answer to a listing holds at most, as with both stores

_GCS = re.compile(r"(?:/upload|/download)?/storage/v1/b(?:/([^/]+)(?:/o(?:/(.*))?)?)?")
_NOT_PASSED_ON = {"connection", "content-length", "date", "server", "transfer-encoding"}


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """A request, of either protocol."""

    method: str
    target: str
    headers: Any
    body: bytes
    is_gcs: bool
    bucket: str
    key: str
    query: dict[str, str]

    @staticmethod
    def of(method: str, target: str, headers: Any, body: bytes) -> "Ask":
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        gcs = _GCS.fullmatch(parts.path)
        if gcs:
            bucket, key = unquote(gcs[1] or ""), unquote(gcs[2] or "") or query.get("name", "")
            bucket = bucket or json.loads(body)["name"]
        else:
            bucket, _, key = unquote(parts.path[1:]).partition("/")
        return Ask(method, target, headers, body, gcs is not None, bucket, key, query)

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and not self.key

    @property
    def name(self) -> str:
        """The key; for a listing the prefix, or where it begins."""
        return (self.query.get("prefix") or self.query.get("startOffset", "")) if self.is_list else self.key

    @property
    def place(self) -> str:
        """`bucket/key`; for a listing `bucket/?` and its prefix."""
        return f"{self.bucket}/{'?' if self.is_list else ''}{self.name}"

    @property
    def makes_bucket(self) -> bool:
        return self.method in ("PUT", "POST") and not self.key

    def created_bucket(self) -> Answer:
        return Answer(body=json.dumps({"name": self.bucket}).encode() if self.is_gcs else b"")

    def error(self, status: int) -> Answer:
        name = {403: "AccessDenied", 404: "NoSuchKey" if self.key else "NoSuchBucket", 503: "SlowDown"}.get(status, "")
        if self.is_gcs:
            body = json.dumps({"error": {"code": status, "message": name}})
        else:
            body = f"<Error><Code>{name}</Code><Message>{status}</Message></Error>"
        return Answer(status, body.encode())


def answered(ask: Ask, objects: dict[str, bytes]) -> Answer:
    if ask.is_list:
        return _listing(ask, objects)
    if ask.method == "HEAD" and not ask.key:
        return Answer(headers={"x-amz-bucket-region": "us-east-1"})
    data = objects.get(ask.key)
    if data is None and (ask.method in ("GET", "HEAD") or (ask.is_gcs and ask.method == "DELETE")):
        return ask.error(404)
    if refused := _condition(ask, _version(data)):
        return ask.error(refused)
    if ask.method == "DELETE":
        objects.pop(ask.key, None)
        return Answer(204)
    if ask.method in ("PUT", "POST"):
        objects[ask.key] = data = ask.body
        return Answer(body=_metadata(ask, ask.key, data) if ask.is_gcs else b"", headers=_versions(data))
    if ask.is_gcs and ask.query.get("alt") != "media":
        return Answer(body=_metadata(ask, ask.key, data))
    return _ranged(ask, data)


def _version(data: bytes | None) -> str:
    """A generation, and what an ETag says; 0 where there is nothing."""
    return "0" if data is None else str(1 + zlib.crc32(data) + (len(data) << 32))


def _versions(data: bytes) -> dict[str, str]:
    return {"ETag": f'"{_version(data)}"', "x-goog-generation": _version(data)}


def _condition(ask: Ask, version: str) -> int | None:
    """The status that refuses a request."""
    wanted, unwanted = (ask.headers.get(name, "").strip('"') for name in ("If-Match", "If-None-Match"))
    wanted = ask.query.get("ifGenerationMatch", wanted)
    unwanted = ask.query.get("ifGenerationNotMatch", unwanted)
    if wanted and wanted != version:
        return 412
    if unwanted == version or (unwanted == "*" and version != "0"):
        return 304 if ask.method in ("GET", "HEAD") else 412
    return None


def _ranged(ask: Ask, data: bytes) -> Answer:
    headers = _versions(data) | {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    if not (span := re.fullmatch(r"bytes=(\d*)-(\d*)", ask.headers.get("Range", ""))):
        return Answer(200, data, headers)
    first, last = span.groups()
    start = int(first) if first else max(0, len(data) - int(last))
    stop = min(len(data), int(last) + 1) if first and last else len(data)
    if start >= stop:
        return Answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
    return Answer(206, data[start:stop], headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})


def _metadata(ask: Ask, key: str, data: bytes) -> bytes:
    return json.dumps(_described(ask, key, data)).encode()


def _described(ask: Ask, key: str, data: bytes) -> dict[str, str]:
    then = "2020-01-01T00:00:00.000Z"
    known = {"kind": "storage#object", "name": key, "bucket": ask.bucket, "size": str(len(data))}
    return known | {"generation": _version(data), "metageneration": "1", "timeCreated": then, "updated": then}


def _listing(ask: Ask, objects: dict[str, bytes]) -> Answer:
    query = ask.query
    first, end = query.get("startOffset", ""), query.get("endOffset")
    after = query.get("continuation-token") or query.get("pageToken") or query.get("start-after", "")
    prefix = query.get("prefix", "")
    keys = [key for key in sorted(objects) if key.startswith(prefix) and key >= first and (end is None or key < end)]
    names = [name for name in _grouped(keys, len(prefix), query.get("delimiter")) if name > after]
    limit = min(PAGE, int(query.get("max-keys") or query.get("maxResults") or PAGE))
    page, token = names[:limit], names[limit - 1] if len(names) > limit else None
    return (_json_page if ask.is_gcs else _xml_page)(ask, objects, page, token)


def _grouped(keys: Iterable[str], inside: int, delimiter: str | None) -> list[str]:
    """Names, or what they begin with up to a delimiter: no key is one of those, unless it ends in the delimiter."""
    if not delimiter:
        return list(keys)
    cut = ((key, key.find(delimiter, inside)) for key in keys)
    return list(dict.fromkeys(key if at < 0 else key[: at + len(delimiter)] for key, at in cut))


def _json_page(ask: Ask, objects: dict[str, bytes], page: list[str], token: str | None) -> Answer:
    delimiter = ask.query.get("delimiter")
    groups = [name for name in page if delimiter and name.endswith(delimiter)]
    items = [_described(ask, name, objects[name]) for name in page if name not in groups]
    found = {"kind": "storage#objects", "items": items, "prefixes": groups, "nextPageToken": token}
    return Answer(body=json.dumps({key: value for key, value in found.items() if value}).encode())


def _xml_page(ask: Ask, objects: dict[str, bytes], page: list[str], token: str | None) -> Answer:
    delimiter = ask.query.get("delimiter")
    out = [f"<ListBucketResult><Name>{ask.bucket}</Name><KeyCount>{len(page)}</KeyCount>"]
    out.append(f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>")
    if token:
        out.append(f"<NextContinuationToken>{escape(token)}</NextContinuationToken>")
    for name in page:
        if delimiter and name.endswith(delimiter):
            out.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
        else:
            about = f"<ETag>&quot;{_version(objects[name])}&quot;</ETag><Size>{len(objects[name])}</Size>"
            out.append(f"<Contents><Key>{escape(name)}</Key>{about}</Contents>")
    return Answer(body="".join([*out, "</ListBucketResult>"]).encode(), headers={"Content-Type": "application/xml"})


def forwarded(ask: Ask, url: str) -> Answer:
    """Another server's answer."""
    other = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        headers = {name: value for name, value in ask.headers.items() if name.lower() not in _NOT_PASSED_ON}
        other.request(ask.method, ask.target, ask.body, headers)
        answer = other.getresponse()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _NOT_PASSED_ON}
        return Answer(answer.status, answer.read(), kept)
    finally:
        other.close()
