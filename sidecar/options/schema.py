"""JSON Schemas: of configuration files, generated from the options; of `summary.json`, generated from its types."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from cyclopts import Parameter

from sidelight.exporter.summary import result
from sidelight.recorded import system
from sidelight.sidecar.options.config import aliases
from sidelight.sidecar.options.fields import ReadsMapping, declarations, declared, read_seconds


def configuration(options: type) -> dict[str, Any]:
    """Return the schema of a command's configuration file: every option of the command, also by its other names, with
    its help, bounds and default.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = declarations(options, Parameter)
    properties = {
        field.name: _written(hints[field.name])
        | {"description": parameters[field.name].help, "default": _json(field.default)}
        for field in dataclasses.fields(options)
        if field.name != "config"
    }
    properties |= {alias: _same_as(name, properties) for alias, name in aliases(options).items()}
    properties |= {name.replace("_", "-"): _same_as(name, properties) for name in properties if "_" in name}
    return {
        "$schema": result.DIALECT,
        "title": "Sidelight configuration",
        "description": "Keys may be written with - or _.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _same_as(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {**properties[name], "description": f"The same as {name}."}


def _written(hint: Any) -> dict[str, Any]:
    """Return the JSON schema type of an option in a file. A duration may have a unit, some texts may be mappings."""
    described = _type(hint)
    parameter = declared(hint, Parameter)
    if parameter is not None and parameter.converter is read_seconds:
        other = {"type": "string", "pattern": r"^(\d+(\.\d+)?(ms|[smhd]))+$"}
    elif declared(hint, ReadsMapping):
        other = {"type": "object"}
    else:
        return described
    return {"anyOf": [*described.get("anyOf", [described]), other]}


def _type(hint: Any) -> dict[str, Any]:
    inner = get_args(hint)[0]
    if get_origin(inner) is tuple:
        # YAML may give one value without brackets.
        hint = get_args(inner)[0] | inner
    described: dict[str, Any] = msgspec.json.schema(hint, schema_hook=lambda _: {"type": "string"})  # of a Path
    return described


def _json(default: object) -> object:
    return list(default) if isinstance(default, tuple) else default


def summary() -> dict[str, Any]:
    """Return the schema of `summary.json`, generated from its types."""
    return result.schema()


def declaration() -> dict[str, Any]:
    """Return the schema of the declaration of a system under test."""
    return system.schema()


def server_metrics() -> dict[str, Any]:
    """Return the schema of `server_metrics_export.json`, a format of AIPerf's."""
    text = resources.files("sidelight.exporter").joinpath("server_metrics.schema.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded
