"""Build what is released twice, from the last commit in two places, and compare: the same bytes, or no release.

    python release/build.py [--image BASE@sha256:DIGEST]

A commit that is tagged v* is a release: it must be the version's tag, and release/identity.toml be filled in. In dist/
are then the wheel, the sdist, their bill of materials and SHA256SUMS. With --image the container image `sidelight` is
built twice as well (podman): on a base that is named by its digest, since a tag may mean another image tomorrow.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import identity

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


def run(command: Sequence[str], *, cwd: Path, **environment: str) -> str:
    """Run a command and return what it printed. Raises CalledProcessError."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, stdout=subprocess.PIPE, check=True, text=True)
    return done.stdout.strip()


def checked_out(place: Path) -> Path:
    """Return a copy of the last commit, without anything that it does not hold."""
    place.mkdir()
    archive = place.parent / f"{place.name}.tar"
    run(["git", "archive", "--format=tar", "-o", str(archive), "HEAD"], cwd=ROOT)
    shutil.unpack_archive(archive, place, filter="data")
    return place


def built(source: Path, seed: str) -> dict[str, bytes]:
    """Return the wheel and the sdist of a copy, by name; nothing may depend on the order of Python's sets."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(source / "out")]
    run(command, cwd=source, PYTHONHASHSEED=seed, SOURCE_DATE_EPOCH="1577836800")
    return {path.name: path.read_bytes() for path in sorted((source / "out").iterdir())}


def image(source: Path, base: str) -> list[str]:
    """Return the digests of the layers of an image that is built from a copy, without anything kept from before."""
    # Only this format knows health checks.
    options = ["--format", "docker", "--quiet", "--no-cache", "--timestamp", "1577836800", "--tag", "sidelight"]
    command = ["podman", "build", *options, "--build-arg", f"PYTHON_IMAGE={base}", "."]
    name = run(command, cwd=source).splitlines()[-1]
    (about,) = json.loads(run(["podman", "image", "inspect", name], cwd=source))
    return list(about["RootFS"]["Layers"])


def refusals(tags: Sequence[str], values: dict[str, str]) -> list[str]:
    """Return reasons not to release a commit that has these tags; one without a tag v* is no release."""
    if not any(tag.startswith("v") for tag in tags):
        return []
    wrong = [f"{name} of release/identity.toml is not filled in" for name in identity.placeholders(values)]
    if f"v{values['version']}" not in tags:
        wrong.append(f"the tag is {' '.join(tags)}, the version {values['version']}")
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Build and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", metavar="BASE", help="base image by its digest: NAME@sha256:...")
    base: str | None = parser.parse_args(arguments).image
    if base is not None and "@sha256:" not in base:
        parser.error(f"--image {base}: must be named by its digest, NAME@sha256:...")
    if wrong := refusals(run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT).split(), identity.identity()):
        print("no release: " + "; ".join(wrong), file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        sources = [checked_out(Path(name) / place) for place in ("one", "another-place")]
        files, again = (built(source, seed) for source, seed in zip(sources, ("1", "2"), strict=True))
        different = sorted(name for name in files.keys() | again.keys() if files.get(name) != again.get(name))
        if base is not None and image(sources[0], base) != image(sources[1], base):
            different.append("the image's layers")
    if different:
        print(f"built twice, and not the same: {', '.join(different)}", file=sys.stderr)
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    files["sidelight.cdx.json"] = (ROOT / "release" / "sbom.cdx.json").read_bytes()
    for name, content in files.items():
        (DIST / name).write_bytes(content)
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items()))
    (DIST / "SHA256SUMS").write_text(sums, encoding="ascii")
    print(sums, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
