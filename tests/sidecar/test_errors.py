"""The error tree is the one drawn at the top of its file."""

from __future__ import annotations

import errno
import importlib
import pkgutil
import re

import pytest

from sidelight import sidecar
from sidelight.recorded import errors
from sidelight.recorded.errors import ConfigurationError, Interrupted, SidelightError
from sidelight.sidecar.cli.messages import unexpected


def drawn() -> dict[str, int]:
    """Return the classes of the drawing under its root, each with its exit code."""
    rows = re.findall(r"^  \+ (\w+) +(\d+)  ", errors.__doc__ or "", flags=re.MULTILINE)
    return {name: int(code) for name, code in rows}


def below(root: type[SidelightError]) -> set[type[SidelightError]]:
    """Return every class that inherits from another, at any depth."""
    return {kind for child in root.__subclasses__() for kind in (child, *below(child))}


def test_every_class_stands_in_the_drawing_with_its_exit_code():
    """Wherever in the package an error were defined, it would have to be drawn; and nothing is drawn that is not."""
    for module in pkgutil.walk_packages(sidecar.__path__, "sidelight.sidecar."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert drawn() == {kind.__name__: kind.exit_code for kind in below(SidelightError)}


def test_the_tree_is_flat_under_its_root():
    """Inheritance has depth one, and the drawing names the root."""
    assert below(SidelightError) == set(SidelightError.__subclasses__())
    assert "\n* SidelightError\n" in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "the memory that this process may take is used up"),
        (RuntimeError("can't start new thread"), "the memory that this process may take is used up"),
        (ImportError("libx.so: failed to map segment from shared object"), "memory that this process may take is used"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "the memory that this process may take is used up"),
        (OSError(errno.EMFILE, "Too many open files"), "all files that this process may have open are (ulimit -n)"),
        (OSError(errno.EFBIG, "File too large", "raw/x.log"), "raw/x.log: File too large"),
        (KeyError("a\nb"), "KeyError: 'a\\nb'; this is a defect, --verbose shows where"),
    ],
)
def test_an_error_without_a_class_of_its_own_is_one_line(error: Exception, said: str):
    """Too little memory is what a user can mend, and no defect."""
    assert said in unexpected(error)


def test_exit_codes_are_those_of_the_contract():
    """2 is what the user can mend in what was typed, 130 what the user wished, and 3 all the rest."""
    assert (2, 130) == (ConfigurationError.exit_code, Interrupted.exit_code)
    assert {3} == {kind.exit_code for kind in below(SidelightError) - {ConfigurationError, Interrupted}}
