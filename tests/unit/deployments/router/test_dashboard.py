"""The dashboard's page: what is served, to whom, and with which headers."""

import re
import tomllib
from pathlib import Path

import pytest

from conserve.settings import Settings
from deployments.router.operators import DASHBOARD as PATH
from deployments.router.operators import DASHBOARD_FILES as FILES
from deployments.router.operators import DASHBOARD_PATHS as PATHS
from tests.checkout import ROOT
from tests.unit.deployments.router.test_access import Keys, ask

FOLDER = ROOT / "deployments" / "router" / "page"


def test_the_page_and_its_parts_are_served_as_they_are() -> None:
    for path, file in zip(PATHS, ("index.html", *FILES), strict=True):
        status, headers, body = ask(Settings(), "GET", path, peer="127.0.0.1")
        assert status == 200, path
        assert body == (FOLDER / file).read_bytes()
        assert headers["cache-control"] == "no-cache"
        assert headers["x-content-type-options"] == "nosniff"
        kind = headers["content-type"].partition(";")[0]
        assert (
            kind
            == {"html": "text/html", "css": "text/css", "js": "text/javascript"}[
                file.rpartition(".")[2]
            ]
        )
        again = {"If-None-Match": f'"other", W/{headers["etag"]}'}
        status, _, body = ask(Settings(), "GET", path, again, peer="127.0.0.1")
        assert (status, body) == (304, b"")


def test_the_page_may_load_and_ask_its_own_server_alone() -> None:
    _, headers, _ = ask(Settings(), "GET", PATH, peer="127.0.0.1")
    policy = dict(
        part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    for file in FOLDER.iterdir():
        text = file.read_text()
        # Of the picture in the tab, a name and no address.
        assert set(re.findall(r"https?:[^'\s]*", text)) <= {"http://www.w3.org/2000/svg"}, file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text)
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src=)", page)


def test_all_files_of_the_page_are_served() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {"index.html", *FILES}


@pytest.mark.parametrize("path", ["/index.html", "/../dashboard.py", "/x.js"])
def test_nothing_else_is_served_below_it(path: str) -> None:
    assert ask(Settings(), "GET", PATH + path, peer="127.0.0.1")[0] == 404


def test_the_page_needs_no_key_and_what_it_asks_for_does(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    for path in PATHS:
        assert ask(keys.settings, "GET", path)[0] == 200
    for path in ("/dashboard/x", "/dashboards", "/v1/events", "/v1/engines", "/v1/conversations"):
        assert ask(keys.settings, "GET", path)[0] == 401


def test_pages_of_other_names_are_refused_as_all_else() -> None:
    refused = ask(Settings(), "GET", PATH, {"Host": "rebound.example"}, peer="127.0.0.1")
    assert refused[0] == 421


def test_the_page_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = ROOT / "deployments" / "router"
    globs = project["tool"]["setuptools"]["package-data"]["deployments.router"]
    held = {path for each in globs for path in package.glob(each)}
    assert held == set(FOLDER.iterdir())
