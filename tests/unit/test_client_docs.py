"""The table of docs/reference/clients.md says what tests install and assert."""

import re

from tests.acceptance.clients.clients import LIBRARIES, PROGRAMS
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
