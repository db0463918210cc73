"""Pinned programs of others, each in a virtual environment of its own outside the tree, installed once.

They lie in the folder that SIDELIGHT_LIVE names, else in the user's cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path


def cache() -> Path:
    """Return the folder of all that is installed and written here."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SIDELIGHT_LIVE") or caches / "sidelight-live")


def environment(name: str, requirements: Sequence[str], *, with_dependencies: bool = True) -> Path:
    """Return the folder of the programs (`bin`) of an environment with these requirements, installed where it is not
    yet there.

    Raises CalledProcessError, with pip's last lines in the log beside the environment.
    """
    wanted = "\n".join(requirements) + "\n"
    folder = cache() / f"{name}-{blake2b(wanted.encode(), digest_size=4).hexdigest()}"
    programs, finished = folder / "bin", folder / "installed"
    if finished.exists():
        return programs
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (folder / "requirements.txt").write_text(wanted)
    print(f"installing {name} into {folder}; pip's output is in {folder / 'install.log'}", flush=True)
    options = [] if with_dependencies else ["--no-deps"]
    with (folder / "install.log").open("w") as log:
        subprocess.run(
            [programs / "python", "-m", "pip", "install", *options, "-r", folder / "requirements.txt"],
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    finished.touch()
    return programs
