"""Write what users install as a software bill of materials (CycloneDX), and compare its licences with those allowed.

    python release/sbom.py [--check]

The packages and versions are those of requirements.lock, their licences and what they need those of the installed
metadata. No moment and no number drawn at random stands in the file, so that it changes with the lock file alone.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
SBOM = ROOT / "release" / "sbom.cdx.json"
NOT_STATED = "NOASSERTION"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
_OPERATORS = {"AND", "OR", "WITH"}


def locked(text: str) -> dict[str, str]:
    """Return the version of each package of a lock file, by its name."""
    return {canonicalize_name(name): version for name, version in _PIN.findall(text)}


def licence_of(package: metadata.PackageMetadata, stated: dict[str, str]) -> str:
    """Return a package's licence as an SPDX expression; NOASSERTION where none is stated.

    In this order: the expression of its metadata, the first line of its licence, its classifiers.
    """
    if expression := package.get("License-Expression"):
        return str(expression)
    classifiers = [
        name.rpartition(" :: ")[2] for name in package.get_all("Classifier") or () if name.startswith("License :: ")
    ]
    first = next(iter((package.get("License") or "").strip().splitlines()), "") or next(iter(classifiers), "")
    return stated.get(first, first) or NOT_STATED


def not_allowed(name: str, expression: str, policy: dict[str, Any]) -> list[str]:
    """Return the licences of an expression that nobody has allowed, for all packages or for this one."""
    allowed = {*policy["allowed"], *policy["packages"].get(name, {}).get("allowed", ())}
    return [word for word in re.findall(r"[^\s()]+", expression) if word not in allowed | _OPERATORS]


def bill(packages: dict[str, str], policy: dict[str, Any]) -> dict[str, Any]:
    """Return the bill of materials of these packages, as they are installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    root = {
        "type": "application",
        "bom-ref": project["name"],
        "name": project["name"],
        "version": project["version"],
        "licenses": [{"expression": project["license"]}],
    }
    direct = [canonicalize_name(Requirement(line).name) for line in project["dependencies"]]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": [_component(name, version, policy["stated"]) for name, version in packages.items()],
        "dependencies": [
            {"ref": project["name"], "dependsOn": [_url(name, packages[name]) for name in sorted(direct)]},
            *(
                {
                    "ref": _url(name, version),
                    "dependsOn": [_url(need, packages[need]) for need in _needs(name, packages)],
                }
                for name, version in packages.items()
            ),
        ],
    }


def _component(name: str, version: str, stated: dict[str, str]) -> dict[str, Any]:
    url, expression = _url(name, version), licence_of(metadata.metadata(name), stated)
    # Which is no expression of SPDX, so it is the name of a licence.
    licence = {"license": {"name": NOT_STATED}} if expression == NOT_STATED else {"expression": expression}
    return {
        "type": "library", "bom-ref": url, "name": name, "version": version, "purl": url, "licenses": [licence],
    }  # fmt: skip


def _url(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _needs(name: str, packages: dict[str, str]) -> list[str]:
    stated = map(Requirement, metadata.requires(name) or ())
    here = [need for need in stated if need.marker is None or need.marker.evaluate({"extra": ""})]
    return sorted({canonicalize_name(need.name) for need in here} & packages.keys())


def problems(packages: dict[str, str], policy: dict[str, Any]) -> Iterator[str]:
    """Yield what keeps the bill from being true, and what is not allowed."""
    for name, version in packages.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != version:
            yield f"{name} is locked at {version}, and here it is {installed}: install requirements.lock again"
            continue
        expression = licence_of(metadata.metadata(name), policy["stated"])
        if odd := not_allowed(name, expression, policy):
            yield f"{name} {version}: {', '.join(odd)} is not allowed by release/licences.toml"


def main(arguments: list[str]) -> int:
    """Write the bill, or with --check compare it; return the exit code."""
    packages = locked(LOCK.read_text(encoding="utf-8"))
    policy = tomllib.loads((ROOT / "release" / "licences.toml").read_text(encoding="utf-8"))
    if wrong := list(problems(packages, policy)):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    text = json.dumps(bill(packages, policy), indent=1) + "\n"
    if "--check" not in arguments:
        SBOM.write_text(text, encoding="utf-8")
    elif not SBOM.is_file() or SBOM.read_text(encoding="utf-8") != text:
        print(f"{SBOM} is out of date: run python release/sbom.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
