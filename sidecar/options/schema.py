"""JSON Schemas, generated from what they describe: the configuration and `summary.json` from their types."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Parameter

from exporter.summary import result
from sidecar.options.config import ALIASES
from sidecar.options.load import RunOptions

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null", Path: "string"}


def configuration() -> dict[str, Any]:
    """Return the schema of a configuration file: every option of `sidelight run`, with its help and default, and its
    other names.
    """
    hints = get_type_hints(RunOptions, include_extras=True)
    properties = {
        field.name: _property(hints[field.name], field.default)
        for field in dataclasses.fields(RunOptions)
        if field.name != "config"
    }
    properties |= {alias: properties[name] | {"description": f"The same as {name}."} for alias, name in ALIASES.items()}
    properties |= {
        name.replace("_", "-"): found | {"description": f"The same as {name}."}
        for name, found in properties.items()
        if "_" in name
    }
    return {
        "$schema": DIALECT,
        "title": "Sidelight configuration",
        "description": "Keys may be written with - or _.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def summary() -> dict[str, Any]:
    """Return the schema of `summary.json`, generated from its types."""
    return result.schema()


def server_metrics() -> dict[str, Any]:
    """Return the schema of `server_metrics_export.json`, a format of AIPerf's."""
    text = resources.files("exporter").joinpath("server_metrics.schema.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def _property(hint: Any, default: object) -> dict[str, Any]:
    inner, *extras = get_args(hint)
    help_text = next((extra.help for extra in extras if isinstance(extra, Parameter) and extra.help), None)
    plain = list(default) if isinstance(default, tuple) else default
    return {**_type(inner), **({"description": help_text} if help_text else {}), "default": plain}


def _type(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        # YAML may give one value without brackets.
        item = _type(get_args(hint)[0])
        return {"anyOf": [item, {"type": "array", "items": item}]}
    if hint in NAMES:
        return {"type": NAMES[hint]}
    parts = get_args(hint)
    if all(part in NAMES for part in parts):
        return {"type": [NAMES[part] for part in parts]}
    return {"anyOf": [_type(part) for part in parts]}
