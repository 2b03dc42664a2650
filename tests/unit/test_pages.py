"""Pages of docs/start and docs/guides say of each command how a test runs it."""

from pathlib import Path

import pytest

from tests.acceptance.pages.page import PAGES, blocks, complaints, listed

KEPT = """
<!-- file: conserve.yaml -->
```yaml
decoders: 2
```

1. Start it:

   <!-- gpu serve -->
   ```sh
   conserve serve \\
     model=Qwen/Qwen3-8B
   ```

<!-- 4 gpus -->
```python
print("```")
```

<!-- not run: a cluster is needed -->
```sh
kubectl apply -k .
```

```text
anything
```
"""


def test_a_page_is_read_as_its_blocks() -> None:
    page = blocks(KEPT)
    assert [(block.language, block.runs, block.serves, block.gpus) for block in page] == [
        ("yaml", False, False, 0), ("sh", True, True, 1), ("python", True, False, 4),
        ("sh", False, False, 0), ("text", False, False, 0),
    ]  # fmt: skip
    assert page[0].file == "conserve.yaml"
    assert page[1].text == "conserve serve \\\n  model=Qwen/Qwen3-8B\n"
    assert page[1].line == 10
    assert [*complaints(page, ["kubectl apply -k ."])] == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```sh\nmake demo\n```", "line 1: the comment before the block is missing"),
        ("<!-- run -->\n\n```sh\nmake demo\n```", "line 3: the comment before"),
        ("<!-- runs -->\n```sh\nmake demo\n```", "unknown comment <!-- runs -->"),
        ("<!-- gpus -->\n```sh\nmake demo\n```", "unknown comment <!-- gpus -->"),
        ("<!-- not run -->\n```sh\nmake demo\n```", "unknown comment <!-- not run -->"),
        ("<!-- not run: root -->\n```sh\nmake demo\n```", "not listed in not_run.toml: make demo"),
        ("<!-- run -->\n```text\nmake demo\n```", "only `sh` and `python` run, not `text`"),
        ("```\nmake demo\n```", "`` is no language of a block"),
        ("<!-- run -->\n```bash\nmake demo\n```", "`bash` is no language of a block"),
        ("<!-- run -->\n```sh\n$ make demo\n```", "a prompt (`$ `)"),
        ("1. A step:\n   ```sh\n   make demo\n   ```", "line 2: the comment before"),
    ],
)
def test_a_page_that_breaks_a_rule_is_refused(text: str, complaint: str) -> None:
    (found,) = complaints(blocks(text), [])
    assert complaint in found


def test_a_listed_block_that_is_gone_is_refused() -> None:
    (found,) = complaints(blocks("<!-- run -->\n```sh\nmake demo\n```"), ["make demo"])
    assert "lists a block that the page runs" in found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_every_page_keeps_the_rules(page: Path) -> None:
    assert [*complaints(blocks(page.read_text()), listed(page))] == []
