"""The pages about clients say what tests install, start and assert."""

import re

from tests.acceptance.clients.clients import BLOCK, LIBRARIES, PAGE, PROGRAMS
from tests.checkout import ROOT


def test_the_table_is_up_to_date() -> None:
    text = (ROOT / "docs/reference/clients.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| `([^`]+)` \| ([^|]+) \|", text, re.MULTILINE)
    shown = {
        name: (version, api, set(re.findall(r"`([^`]+)`", ids))) for name, version, api, ids in rows
    }
    assert shown == {
        client.name: (client.version, client.api, set(client.ids))
        for client in (*LIBRARIES, *PROGRAMS)
    }


def test_each_client_of_the_guide_is_tried() -> None:
    tried = {client.name.partition(",")[0] for client in (*LIBRARIES, *PROGRAMS)}
    shown = [name for name, _, _ in BLOCK.findall(PAGE)]
    assert set(shown) == tried
    assert PAGE.count("<!-- client: ") == len(shown)
