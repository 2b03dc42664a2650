"""Write the tables of docs/reference/metrics.md from the metrics that the code declares.

python -m scripts.metrics_table          # rewrite them
python -m scripts.metrics_table --check  # exit 1 if they are out of date
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deployments.table.engine_metrics import ENERGY, ENGINES, SCHEDULERS
from deployments.table.metrics import ANSWERS, BUILD, COUNTER, TABLE, Described, Metrics, Row
from deployments.table.tenant_metrics import TENANTS, TOKENS

METRICS = Path(__file__).resolve().parents[1] / "docs/reference/metrics.md"
BEGIN = "<!-- metrics: begin -->\n"
END = "<!-- metrics: end -->\n"


def groups() -> dict[str, list[Described]]:
    """Return all metrics, by heading."""
    return {
        "Conversations, turns and handoffs": [*Metrics().described, *_rows(TABLE)],
        "Tenants and tokens": _rows((*TOKENS, *TENANTS)),
        "Engines": _rows(ENGINES),
        "Schedulers (`engine_scheduler: conversation`)": _rows(SCHEDULERS),
        "GPUs": _rows(ENERGY),
        "The application": _rows((*BUILD, *ANSWERS)),
    }


def _rows(rows: Iterable[Row[Any]]) -> list[Described]:
    return [
        Described(f"{row.name}_total", "counter", row.labels, row.help)
        if row.kind is COUNTER
        else Described(row.name, "gauge", row.labels, row.help)
        for row in rows
    ]


def tables() -> str:
    """All metrics, as Markdown."""
    lines = []
    for heading, metrics in groups().items():
        lines += [f"### {heading}", "", "| metric | type | labels | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        for metric in metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    text = METRICS.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    wanted = head + BEGIN + "\n" + tables() + "\n" + END + tail
    if "--check" in sys.argv[1:]:
        return int(wanted != text)
    METRICS.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
