"""Custom resource definitions as JSON schemas, read more strictly than an API server reads them.

Like there, defaults count before `required` is checked; unlike there, an unknown field is an error
and not dropped. The definitions' CEL rules are not evaluated.
"""

import copy
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

Schema = dict[str, Any]


def load_schemas(folder: Path) -> dict[tuple[str, str], Schema]:
    """(apiVersion, kind) to schema, for every definition in a folder."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        # Safe in both forms; the one in C reads a megabyte in a fraction of the time.
        definition = yaml.load(path.read_text(), Loader=loader)["spec"]  # noqa: S506
        for version in definition["versions"]:
            key = (f"{definition['group']}/{version['name']}", definition["names"]["kind"])
            if version["name"] == "v1":
                schema = _closed(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[key] = schema
    return found


def errors(schema: Schema, document: dict[str, Any]) -> list[str]:
    """What is wrong with a document, as `path: message`."""
    filled = copy.deepcopy(document)
    _fill(schema, filled)
    return [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(filled)
    ]


def _closed(node: Any) -> Any:
    """A part of an OpenAPI schema as JSON schema without room for unknown fields."""
    if isinstance(node, list):
        return [_closed(one) for one in node]
    if not isinstance(node, dict):
        return node
    literal = ("enum", "default")
    out = {
        key: value if key in literal else _closed(value)
        for key, value in node.items()
        if key != "description"
    }
    if out.get("x-kubernetes-int-or-string") is True:
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    if out.get("nullable") is True and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    opened = out.get("x-kubernetes-preserve-unknown-fields") is True
    if isinstance(out.get("properties"), dict) and out.get("type") == "object" and not opened:
        out.setdefault("additionalProperties", False)
    return out


def _fill(schema: Any, value: Any) -> None:
    """Put defaults into a document, in place."""
    if not isinstance(schema, dict):
        return
    if isinstance(value, list):
        for one in value:
            _fill(schema.get("items"), one)
    elif isinstance(value, dict):
        properties = schema.get("properties") or {}
        for name, part in properties.items():
            if isinstance(part, dict) and "default" in part:
                value.setdefault(name, copy.deepcopy(part["default"]))
        for name, one in value.items():
            _fill(properties.get(name, schema.get("additionalProperties")), one)
