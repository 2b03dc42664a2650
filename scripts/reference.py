"""Write the parts of docs/reference that are made from the code.

python -m scripts.reference          # rewrite them
python -m scripts.reference --check  # name those that are out of date, and exit 1 if one is
"""

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from conserve import apis
from conserve.errors import ApiError
from conserve.settings import (
    AutoscalingSettings,
    DiskSettings,
    EnvironmentSettings,
    LimitSettings,
    LMCacheSettings,
    MediaSettings,
    RoleSettings,
    Settings,
    TierSettings,
    TLSSettings,
)
from conserve.settings.expected import schema
from conserve.tenants.keyfile import KeyFile, write
from deployments.router.access import Access
from deployments.router.interface import COMPONENTS, PATHS, SCHEMAS
from deployments.router.operators import DASHBOARD_FILES
from deployments.table.engine_metrics import ENERGY, ENGINES, SCHEDULERS
from deployments.table.metrics import APPLICATION, COUNTER, TABLE, Described, Metrics, Row
from deployments.table.tenant_metrics import TENANTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/reference"


def wanted() -> dict[Path, str]:
    """Return the text that each file should have."""
    made = {"settings": _settings, "metrics": _metrics, "paths": _paths, "errors": _statuses}
    files = {PAGES / "settings.schema.json": json.dumps(schema(), indent=1) + "\n"}
    for name, make in made.items():
        file = PAGES / f"{name}.md"
        begin, end = (f"<!-- {name}: {place} -->\n" for place in ("begin", "end"))
        head, _, rest = file.read_text().partition(begin)
        tables = "\n\n".join(make())
        files[file] = f"{head}{begin}\n{tables}\n\n{end}{rest.partition(end)[2]}"
    return files


def _table(heads: str, rows: Iterable[Iterable[Any]]) -> str:
    columns = heads.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# --- settings -------------------------------------------------------------------------------------

# These have a row for each of their fields.
_GROUPS = (
    LMCacheSettings,
    AutoscalingSettings,
    EnvironmentSettings,
    MediaSettings,
    TLSSettings,
)


def _settings() -> Iterator[str]:
    rows: list[tuple[str, ...]] = []
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, _GROUPS):
            rows += _rows_of(type(default), f"{name}.", "limits", "disk")
            continue
        shown = default.replicas if isinstance(default, RoleSettings) else default
        rows.append((f"`{name}`", _cell(shown), str(field.description)))
    rows += _rows_of(RoleSettings, "decoders.", "replicas")
    rows += _rows_of(TierSettings, "tiers.NAME.")
    rows += _rows_of(DiskSettings, "lmcache.disk.")
    rows += _rows_of(LimitSettings, "environments.limits.")
    yield _table("setting | default | what it does", rows)


def _rows_of(model: type[BaseModel], prefix: str, *skipped: str) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        if name not in skipped:
            default = _cell(field.get_default(call_default_factory=True))
            yield f"`{prefix}{name}`", default, str(field.description)


def _cell(value: Any) -> str:
    return "" if value in (None, {}, PydanticUndefined) else f"`{value}`"


# --- metrics --------------------------------------------------------------------------------------


def groups() -> dict[str, list[Described]]:
    """Return all metrics, by heading."""
    return {
        "Conversations, turns and handoffs": [*Metrics().described, *_described(TABLE)],
        "Tenants and tokens": _described(TENANTS),
        "Engines": _described(ENGINES),
        "Schedulers (`engine_scheduler: conversation`)": _described(SCHEDULERS),
        "GPUs": _described(ENERGY),
        "The application": _described(APPLICATION),
    }


def _described(rows: Iterable[Row[Any]]) -> list[Described]:
    return [
        Described(f"{row.name}_total", "counter", row.labels, row.help)
        if row.kind is COUNTER
        else Described(row.name, "gauge", row.labels, row.help)
        for row in rows
    ]


def _metrics() -> Iterator[str]:
    for heading, metrics in groups().items():
        yield f"### {heading}"
        yield _table(
            "metric | type | labels | meaning",
            ((f"`{one.name}`", one.kind, _code(one.labels), one.help) for one in metrics),
        )


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- paths ----------------------------------------------------------------------------------------

_HERE, _ELSEWHERE = "127.0.0.1", "192.0.2.1"
# By whether the router's machine may ask without a key, and another machine with a tenant's.
_WITH_KEYS = {
    (False, True): "any key",
    (True, False): "this machine, or an admin key",
    (False, False): "an admin key",
}


def _paths() -> Iterator[str]:
    rows = []
    with TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        content, key = KeyFile.new().with_key("tenant", "2026-01-31")
        write(file, content)
        unkeyed, keyed = Access(Settings()), Access(Settings(keys_file=str(file)))
        for path, operations in PATHS.items():
            without = "anyone" if _admits(path, unkeyed, _ELSEWHERE) else "this machine"
            here, tenant = _admits(path, keyed, _HERE), _admits(path, keyed, _ELSEWHERE, key)
            open_ = _admits(path, keyed, _ELSEWHERE)
            with_keys = "anyone" if open_ else _WITH_KEYS[here, tenant]
            for method, operation in operations.items():
                asked = f"`{method.upper()} {path}{_query(operation)}`"
                bodies = operation.get("requestBody"), operation["responses"]["200"]
                told = " → ".join(_content(body["content"]) for body in bodies if body)
                rows.append((asked, without, with_keys, operation["summary"], told))
    yield _table("path | without keys | with keys | what it does | body → answer", rows)
    yield "## Bodies and answers"
    yield _table("object | what it is | fields", _objects())


def _objects() -> Iterator[tuple[str, ...]]:
    for name, one in SCHEMAS.items():
        fields = []
        for field, kind in one.get("properties", {}).items():
            within = re.findall(r'/schemas/(\w+)"', json.dumps(kind))
            fields.append(f"`{field}`" + f" ({_code(within)})" * bool(within))
        if fields:
            what = one.get("description", "").partition("\n")[0]
            yield f"`{name}`", what, ", ".join(fields)


def _admits(path: str, access: Access, host: str, key: str = "") -> bool:
    path = re.sub(r"{\w+}", "x", path.replace("{file}", DASHBOARD_FILES[0]))
    headers = [(b"x-api-key", key.encode())]
    try:
        access.admit({"type": "http", "path": path, "client": (host, 1), "headers": headers})
    except ApiError:
        return False
    return True


def _query(operation: dict[str, Any]) -> str:
    found = (COMPONENTS["parameters"][_name(one)] for one in operation["parameters"])
    names = [one["name"] for one in found if one["in"] == "query"]
    return "?" * bool(names) + "&".join(names)


def _name(reference: dict[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


def _content(medias: dict[str, Any]) -> str:
    names = []
    for media, content in medias.items():
        one = content.get("schema", {})
        schemas = [_name(each) for each in one.get("anyOf", [one]) if "$ref" in each]
        names += [f"`{name}`" for name in schemas] or [media]
    return ", ".join(names)


# --- errors ---------------------------------------------------------------------------------------

# Classes of errors, and the order of their arguments.
_MAKERS = ("ApiError", "Refusal", "super().__init__")
_ORDER = ("status", "message", "code", "retry_after_s")


def _statuses() -> Iterator[str]:
    rows = []
    for status in sorted({int(status) for status, _ in errors_made() if status.isdigit()}):
        bodies = (ApiError(status, "").body(path) for path in (apis.CHAT, apis.MESSAGES))
        types = (f"`{body['error']['type']}`" for body in bodies)
        rows.append((status, HTTPStatus(status).phrase, *types))
    yield _table("status | meaning | OpenAI's `type` | Anthropic's `type`", rows)


def errors_made() -> dict[tuple[str, str], set[str]]:
    """Return what the code gives errors as `Retry-After`, by status and code.

    The status is `5xx` where it is an engine's; the code is `none` where there is none.
    """
    nodes = [
        node
        for package in ("conserve", "deployments", "conserve_tools")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    ]
    constants = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    # Starlette refuses methods.
    made: dict[tuple[str, str], set[str]] = {("405", "none"): set()}
    for node in nodes:
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in _MAKERS:
            continue
        given = dict(zip(_ORDER, map(ast.unparse, node.args), strict=False))
        given |= {one.arg: ast.unparse(one.value) for one in node.keywords if one.arg}
        status, code = given.get("status", ""), given.get("code", "'none'")
        code = constants[code] if code.isupper() else code
        # A client that has left reads no error (499). Some errors are only passed on.
        if status == "499" or not (status.isdigit() or given.get("code", "").startswith("'")):
            continue
        after = made.setdefault((status if status.isdigit() else "5xx", code.strip("'")), set())
        if (seconds := given.get("retry_after_s")) is not None:
            after.add(seconds if seconds.isdigit() else "computed")
    return made


def main() -> int:
    stale = {file: text for file, text in wanted().items() if file.read_text() != text}
    for file, text in stale.items():
        print(file.relative_to(ROOT))
        if "--check" not in sys.argv[1:]:
            file.write_text(text)
    return int("--check" in sys.argv[1:] and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
