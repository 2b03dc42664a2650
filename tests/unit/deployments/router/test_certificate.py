"""TLS: a router's certificate, renewed while clients are connected, and what is wrong with one."""

import asyncio
import contextlib
import datetime
import http.client
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from conserve import followed, launch
from conserve.settings import Settings, SettingsError, load
from deployments.router.certificate import CertificateError, require_certificate
from deployments.router.router import server_config
from tests.unit.deployments.asgi import listening

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
DAY = datetime.timedelta(days=1)


def issued(name: str, passphrase: bytes | None = None) -> tuple[bytes, bytes]:
    """Return a certificate for localhost, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encrypted = (
        serialization.BestAvailableEncryption(passphrase)
        if passphrase
        else serialization.NoEncryption()
    )
    return signed.public_bytes(PEM), key.private_bytes(PEM, PKCS8, encrypted)


class Files:
    """A certificate's two files, and settings that name them."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = folder / "tls.crt", folder / "tls.key"
        self.write(issued("first"))
        tls = {"tls.cert_file": str(self.cert), "tls.key_file": str(self.key)}
        self.settings = load({"max_body_bytes": 2048, **tls})

    def write(self, pair: tuple[bytes, bytes]) -> None:
        for path, content in zip((self.cert, self.key), pair, strict=True):
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.replace(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


# --- What is said at the start --------------------------------------------------------------------


def refused(files: Files) -> str:
    with pytest.raises(SettingsError) as refusal:
        require_certificate(files.settings)
    said = str(refusal.value)
    assert "\n" not in said
    return said


def test_what_is_usable_is_not_refused(files: Files) -> None:
    require_certificate(files.settings)
    require_certificate(Settings())


def test_what_is_wrong_is_said_in_one_line(files: Files) -> None:
    cert, key = issued("first")
    files.write((cert, issued("second")[1]))
    assert refused(files) == f"tls.key_file: {files.key} is not the key of the certificate in " + (
        str(files.cert)
    )
    files.write((b"nothing", key))
    assert f"tls.cert_file: {files.cert} has no certificate in PEM, or" in refused(files)
    files.write((cert, b"nothing"))
    assert f"or {files.key} no key" in refused(files)
    files.write(issued("first", passphrase=b"secret"))
    assert f"tls.key_file: {files.key} is encrypted; give a key" in refused(files)
    files.key.unlink()
    assert refused(files) == f"tls.key_file: cannot read {files.key}: No such file or directory"
    # As it comes up where that was not looked at.
    with pytest.raises(CertificateError, match="cannot read"):
        server_config(nothing, files.settings)


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """Answer nothing."""


# --- A server that runs ---------------------------------------------------------------------------


class Application:
    """Answers, on one path with a stream that lasts until it is told to end."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scheme = scope["scheme"].encode()
        await send({"type": "http.response.body", "body": scheme, "more_body": True})
        while scope["path"] == "/stream" and not self.goes_on.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b" rest", "more_body": False})


@pytest.fixture(params=["asyncio", "uvloop"])
def served(
    request: pytest.FixtureRequest, files: Files, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Application, int]]:
    """A router's server, on either of the event loops that Ray may run it on."""
    monkeypatch.setattr(followed, "LOOK_S", 0.0)
    application = Application()
    config = server_config(application, files.settings)
    config.loop = request.param
    with listening(config) as port:
        yield application, port
        application.goes_on.set()


def trusting(files: Files) -> ssl.SSLContext:
    """A client that trusts the certificate that the file has now, and no other."""
    return ssl.create_default_context(cafile=str(files.cert))


@contextlib.contextmanager
def asked(port: int, path: str, context: ssl.SSLContext) -> Iterator[http.client.HTTPResponse]:
    client = http.client.HTTPSConnection("localhost", port, timeout=30, context=context)
    try:
        client.request("GET", path)
        yield client.getresponse()
    finally:
        client.close()


def answer(port: int, context: ssl.SSLContext) -> bytes:
    with asked(port, "/", context) as response:
        return response.read()


def name_shown(port: int) -> str:
    """Return the name in the certificate that a client gets, which names no server itself."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as raw,
        context.wrap_socket(raw) as connection,
    ):
        shown = x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"")
    return str(shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def test_a_renewed_certificate_is_shown_and_no_connection_is_cut(
    served: tuple[Application, int], files: Files
) -> None:
    application, port = served
    old = trusting(files)
    assert answer(port, old) == b"https rest"
    with asked(port, "/stream", old) as stream:
        assert stream.read(5) == b"https"
        files.write(issued("second"))
        assert name_shown(port) == "second"
        assert answer(port, trusting(files)) == b"https rest"
        with pytest.raises(ssl.SSLCertVerificationError):
            answer(port, old)
        application.goes_on.set()
        assert stream.read() == b" rest"


def test_a_bad_certificate_is_logged_once_and_the_old_one_stays(
    served: tuple[Application, int], files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    _, port = served
    caplog.set_level(logging.INFO, "ray.serve")
    cert, _ = issued("second")
    files.cert.write_bytes(cert)
    for _ in range(3):
        assert name_shown(port) == "first"
    (said,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "is not the key of" in said.getMessage()
    files.cert.unlink()
    assert name_shown(port) == "first"
    files.write(issued("third"))
    assert name_shown(port) == "third"


def test_plain_http_is_not_answered(served: tuple[Application, int]) -> None:
    _, port = served
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in client.recv(100)


def test_the_command_finds_its_own_application(
    served: tuple[Application, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the certificate is neither for loopback nor of a known authority."""
    _, port = served
    found: list[bytes] = []
    health = {"decoders": 2}
    monkeypatch.setattr(
        launch.httpx.Response, "json", lambda answer: found.append(answer.content) or health
    )
    assert launch.health(f"https://127.0.0.1:{port}") == health
    assert found == [b"https rest"]
