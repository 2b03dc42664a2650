"""The router's certificate, which is read again when its files change.

Connections keep the certificate that they began with.
"""

import logging
import ssl
import time
from pathlib import Path

from conserve.settings import Settings, SettingsError
from conserve.tenants.keyfile import seen

logger = logging.getLogger("ray.serve")

# How often the files are looked at, by connections that begin.
_LOOK_S = 2.0


class CertificateError(Exception):
    """The certificate and its key are not usable; the message is one line that says why."""


class Certificate:
    """Gives connections that begin the newest usable certificate.

    The server's `context` stays the same. ``files`` are those of the certificate and its chain, and
    of its private key; raises `CertificateError` if they are not usable at the start.
    """

    def __init__(self, files: tuple[str, str]) -> None:
        self._files = files
        self._seen = [*map(seen, map(Path, files))]
        self.context = self._newest = read(files)
        self._looked_s = time.monotonic()
        # OpenSSL calls it for clients that name no server, too.
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._look()
        connection.context = self._newest

    def _look(self) -> None:
        found = [*map(seen, map(Path, self._files))]
        if found == self._seen:
            return
        # A bad one is logged once, and read again only when the files change again.
        self._seen = found
        try:
            self._newest = read(self._files)
        except CertificateError as error:
            logger.error("%s; the router goes on with the certificate that it has", error)
        except Exception:
            logger.exception("the certificate cannot be read; the router goes on with the old one")
        else:
            logger.info("the router has read its certificate again, from %s", self._files[0])


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
