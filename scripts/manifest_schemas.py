"""Write tests/unit/deploy/schemas.json.xz, by which tests check deploy/ without a network.

`python -m scripts.manifest_schemas FOLDER`, with a clone of each of sources.json's as OWNER+NAME.
Schemas lose their descriptions, and refuse fields that they do not name.
"""

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parents[1] / "tests" / "unit" / "deploy" / "schemas.json.xz"
OF_GO = "^(?i)(abort|warn)?$"  # No pattern of JSON Schema.
METADATA = {"$ref": "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}


def main(folder: Path) -> None:
    found: dict[str, Any] = {"kinds": (kinds := {}), "definitions": (definitions := {})}
    for source in json.loads(SCHEMAS.with_name("sources.json").read_text()):
        git = ["git", "-C", str(folder / source["repository"].replace("/", "+")), "show"]
        for path in source["files"]:
            at = f"{source['commit']}:{path}"
            read = yaml.load(subprocess.check_output([*git, at]), yaml.CSafeLoader)
            if "compose" in path:
                found["compose"] = read
            elif path.endswith(".yaml"):
                of, version = read["spec"], read["spec"]["versions"][0]
                name = f"{of['group']}/{version['name']} {of['names']['kind']}"
                kinds[name] = kind = strict(version["schema"]["openAPIV3Schema"])
                kind["properties"]["metadata"] = METADATA
            else:
                for name, schema in read["definitions"].items():
                    definitions[name] = strict(schema)
                    for of in schema.get("x-kubernetes-group-version-kind", ()):
                        full = f"{of['group']}/{of['version']} {of['kind']}".lstrip("/")
                        kinds[full] = {"$ref": f"#/definitions/{name}"}
                # An integer too, which version 2 of OpenAPI cannot say.
                definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = {}
    SCHEMAS.write_bytes(lzma.compress(json.dumps(found).encode()))


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: strict(one) for key, one in schema.items()
            if key not in ("description", "format") and one != OF_GO}  # fmt: skip
    if "properties" in schema:
        kept["properties"] = {key: strict(one) for key, one in schema["properties"].items()}
        kept.setdefault("additionalProperties", "x-kubernetes-preserve-unknown-fields" in schema)
    return kept


if __name__ == "__main__":
    main(Path(sys.argv[1]))
