"""The router's certificate, which is read again when its files change.

Connections keep the certificate that they began with.
"""

import ssl
import time
from pathlib import Path

from conserve.followed import Followed
from conserve.settings import Settings, SettingsError


class CertificateError(ValueError):
    """The certificate and its key are not usable; the message is one line that says why."""


class Certificate:
    """Gives connections that begin the newest usable certificate.

    The server's `context` stays the same. ``files`` are those of the certificate and its chain, and
    of its private key; raises `CertificateError` if they are not usable at the start.
    """

    def __init__(self, files: tuple[str, str]) -> None:
        paths = tuple(map(Path, files))
        self._newest = Followed(paths, lambda: read(files), time.monotonic())
        self.context = self._newest.says(time.monotonic())
        # OpenSSL calls it for clients that name no server, too.
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self._newest.says(time.monotonic())


def read(files: tuple[str, str]) -> ssl.SSLContext:
    """Return a context with the certificate and key of these files, or raise `CertificateError`."""
    cert_file, key_file = files
    for name, file in (("cert_file", cert_file), ("key_file", key_file)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise CertificateError(f"tls.{name}: cannot read {file}: {error.strerror}") from None

    def passphrase() -> str:
        # By default it would be asked for at the terminal.
        raise CertificateError(
            f"tls.key_file: {key_file} is encrypted; give a key without a passphrase, which only "
            "the router's user can read"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_file, key_file, passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"tls.key_file: {key_file} is not the key of the certificate in {cert_file}"
        else:
            why = f"tls.cert_file: {cert_file} has no certificate in PEM, or {key_file} no key"
        raise CertificateError(why) from None
    return context


def require_certificate(settings: Settings) -> None:
    """Check the certificate, before engines are started in vain; raises `SettingsError`."""
    if settings.tls.files is not None:
        try:
            read(settings.tls.files)
        except CertificateError as error:
            raise SettingsError(str(error)) from None
