"""The house rules that a machine can keep: which way imports point, how large things get, and what must not leak."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# Which of our packages each may import, itself aside.
MAY_IMPORT = {
    "rundir": set(),
    "loadgen": {"rundir"},
    "scraper": {"rundir"},
    "simulator": {"rundir"},
    "recorded": {"rundir", "loadgen", "scraper"},
    "correlator": {"rundir", "loadgen", "scraper", "recorded"},
    "twin": {"rundir", "loadgen", "simulator", "recorded", "correlator"},
    "exporter": {"rundir", "loadgen", "scraper", "recorded", "correlator", "twin"},
    "sidecar": {"rundir", "loadgen", "scraper", "simulator", "recorded", "correlator", "twin", "exporter"},
    "methodology": {
        "rundir", "loadgen", "scraper", "simulator", "recorded", "correlator", "twin", "exporter", "sidecar",
    },
    "sidelight": {"rundir", "loadgen", "scraper", "recorded", "correlator", "exporter", "sidecar"},
}  # fmt: skip
# Rooms (modules and folders) that a folder shows. More where one thing varies, each room a variant, and at a root.
ROOMS, VARIANTS, ROOT_ROOMS = 9, 12, 12
VARYING = {"protocols", "engines", "workloads", "dialects", "procedures"}
# Import levels of a folder's rooms: how long a chain of imports among them may be.
LEVELS, ROOT_LEVELS = 5, 7
# Folders and modules that are still to be brought in line; this set only ever shrinks.
UNFINISHED: set[str] = set()
MOST_IMPORTS, PACKAGE_LINES = 20, 60
MODULE_LINES = 500
FUNCTION_LINES, PRODUCT_FUNCTION_LINES = 80, 60
# `except Exception` or wider: around a sink and at the top of a command, where it logs and counts.
BROAD_EXCEPTS = 4
# Words that make a reader from elsewhere stop; they stand in no identifier, docstring or comment.
BANNED_WORDS = frozenset({
    "told", "untold", "stranger", "strangers", "whoever", "nobody", "nobodys", "mourn", "mourned", "taught", "crumb",
    "crumbs", "lacking",
})  # fmt: skip
# Words that say nothing of what a name holds; as parts of a name they may.
EMPTY_NAMES = frozenset({"found", "own", "one", "mine", "told", "kept", "made"})
BANNED_PHRASES = re.compile(r"(?<!there )\bis no (?!longer\b|more\b|less\b)\w+|\bwhose words\b", re.IGNORECASE)
BANNED_STEMS = ("utils", "util", "helpers", "helper", "manager", "handler", "base", "common", "misc")
# Put together here, so that this file does not name them.
REGISTRIES = tuple(
    f"{name}.{top}"
    for name, top in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("crates", "io"),
        ("anaconda", "org"),
        ("anaconda", "com"),
        ("proxy.golang", "org"),
        ("rubygems", "org"),
    )
)
PLACES = (("wo", "rk/"), ("opt/d", "ev/"), ("opt/wh", "eels"), ("opt/py", "pi"), ("tmp/br", "ief"))
LOCKS = ("requirements.lock", "requirements-dev.lock")


@cache
def tracked() -> tuple[Path, ...]:
    """Return every file that is, or is about to be, under version control."""
    if not (REPOSITORY / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git clone, so nothing is tracked")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607  whichever git is there
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    ).stdout.decode()
    return tuple(path for name in listed.split("\0") if name and (path := REPOSITORY / name).is_file())


def modules() -> dict[str, Path]:
    """Return the modules of all packages by their dotted names."""
    paths = {}
    for package in MAY_IMPORT:
        for path in (REPOSITORY / package).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules()


@cache
def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file's syntax tree."""
    return tuple(ast.walk(parsed(path)))


@cache
def imports(module: str) -> frozenset[str]:
    """Return what a module imports of ours, inside functions too, as modules where the name is one."""
    imported = set()
    for node in nodes(MODULES[module]):
        if isinstance(node, ast.Import):
            names = [alias.name.removeprefix("sidelight.") for alias in node.names]
            imported |= {name for name in names if name.partition(".")[0] in MAY_IMPORT}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            source = (node.module or "").removeprefix("sidelight.")
            source = source if source.partition(".")[0] in MAY_IMPORT else (node.module or "")
            if source.partition(".")[0] in MAY_IMPORT:
                names = [f"{source}.{alias.name}" for alias in node.names]
                imported |= {name if name in MODULES else source for name in names}
    return frozenset(imported)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str):
    """The two sides and the simulator know nothing of each other, results know logs, nothing knows the sidecar."""
    package = module.partition(".")[0]
    others = {name.partition(".")[0] for name in imports(module)} - {package}
    assert others <= MAY_IMPORT[package]


def test_a_name_that_is_imported_exists():
    """Every module of ours that is named in an import is there: the rule above saw all of them."""
    named = {name for module in MODULES for name in imports(module)}
    assert named <= set(MODULES)


def test_modules_have_no_import_cycle():
    """Not even one that only closes inside a function."""
    graph = {module: imports(module) - {module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_module_imports_few_others():
    """At most twenty of ours, inside functions too."""
    counts = {module: len(imports(module) - {module}) for module in MODULES}
    assert {module for module, count in counts.items() if count > MOST_IMPORTS} == UNFINISHED


def test_a_class_has_a_name_of_its_own():
    """Also one that is private to its module; but a run, of the directory and of the library."""
    names = Counter(
        node.name for path in MODULES.values() for node in parsed(path).body if isinstance(node, ast.ClassDef)
    )
    assert {"Run"} == {name for name, count in names.items() if count > 1}


def test_code_stands_in_modules_with_names():
    """A package's own file holds at most a list of its names."""
    packages = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert [] == [path for path in packages if len(path.read_text(encoding="utf-8").splitlines()) > PACKAGE_LINES]


def folders() -> dict[str, set[str]]:
    """Return the rooms of each folder: the modules and folders in it, the folder's own `__init__` aside."""
    rooms: dict[str, set[str]] = {}
    for module in MODULES:
        parts = module.split(".")
        for depth in range(1, len(parts)):
            rooms.setdefault(".".join(parts[:depth]), set()).add(parts[depth])
    return rooms


def test_a_folder_is_taken_in_at_a_glance():
    """At most nine rooms; twelve where each is a variant of one thing, and at a package's root."""

    def limit(folder: str) -> int:
        if "." not in folder:
            return ROOT_ROOMS
        return VARIANTS if folder.rpartition(".")[2] in VARYING else ROOMS

    wide = {folder for folder, rooms in folders().items() if len(rooms) > limit(folder)}
    assert wide <= UNFINISHED


def levels(folder: str) -> int:
    """Return how long the longest chain of imports among the rooms of a folder is."""
    rooms = {f"{folder}.{room}" for room in folders()[folder]} | {folder}
    depth = folder.count(".") + 2

    def room(module: str) -> str:
        return module if module == folder else ".".join(module.split(".")[:depth])

    graph: dict[str, set[str]] = {name: set() for name in rooms}
    for module in MODULES:
        if room(module) in rooms:
            graph[room(module)] |= {room(name) for name in imports(module)} & rooms - {room(module)}
    try:
        order = TopologicalSorter(graph).static_order()
        height: dict[str, int] = {}
        for name in order:
            height[name] = 1 + max((height[below] for below in graph[name]), default=0)
    except CycleError as error:
        pytest.fail(f"rooms of {folder} import each other: " + " -> ".join(error.args[1]))
    return max(height.values())


@pytest.mark.parametrize("folder", sorted(folders().keys() - UNFINISHED))
def test_imports_in_a_folder_are_shallow(folder: str):
    """At most five levels, seven at a package's root; and no two rooms that import each other, as wholes."""
    assert levels(folder) <= (LEVELS if "." in folder else ROOT_LEVELS)


def test_modules_fit_the_eye():
    """At most 500 lines each, tests too."""
    long = {
        str(path.relative_to(REPOSITORY)): lines
        for path in tracked()
        if path.suffix == ".py" and (lines := len(path.read_text(encoding="utf-8").splitlines())) > MODULE_LINES
    }
    assert {} == long


def test_functions_fit_the_screen():
    """At most 80 lines each, decorators aside, tests too."""
    long = {
        f"{path.relative_to(REPOSITORY)}:{node.name}": lines
        for path in tracked()
        if path.suffix == ".py"
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    }
    assert {} == long


def test_functions_of_the_product_fit_half_a_screen():
    """At most 60 lines each."""
    long = {
        f"{module}.{node.name}": lines
        for module, path in MODULES.items()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > PRODUCT_FUNCTION_LINES
    }
    assert {} == long


def test_few_excepts_are_broad():
    """A bare one, `Exception` or `BaseException`; one that cleans up and raises again does not count."""

    def is_broad(handler: ast.ExceptHandler) -> bool:
        last = handler.body[-1]
        if isinstance(last, ast.Raise) and last.exc is None:
            return False
        if handler.type is None:
            return True
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return any(isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"} for kind in kinds)

    broad = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    ]
    assert len(broad) <= BROAD_EXCEPTS, broad


def test_the_wall_clock_is_read_in_one_place():
    """So that tests can set it for all processes."""
    readers = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
    read = [
        module
        for module, path in MODULES.items()
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in readers
    ]
    assert {"rundir.clock"} == set(read)


def identifiers(module: Sequence[ast.AST]) -> Iterator[str]:
    """Give the names that a module defines or binds: functions, classes, arguments, variables, attributes, errors."""
    for node in module:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def docstrings(module: Sequence[ast.AST]) -> Iterator[str]:
    """Give the docstrings of a module, its classes and functions, each on one line."""
    for node in module:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield " ".join((ast.get_docstring(node) or "").split())


def odd_words(module: Sequence[ast.AST], source: str) -> set[str]:
    """Return the banned words and phrases of a module: in docstrings and comments, identifiers and their parts."""
    names = set(identifiers(module))
    parts = {part.lower() for name in names for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    prose = [*docstrings(module), *re.findall(r"(?:^|\s)#\s(.*)", source)]
    words = {word.replace("'", "") for text in prose for word in re.findall(r"[a-z']+", text.lower())}
    phrases = {match[0] for text in prose for match in BANNED_PHRASES.finditer(text)}
    return ((parts | words) & BANNED_WORDS) | ({name.strip("_") for name in names} & EMPTY_NAMES) | phrases


@pytest.mark.parametrize(
    ("source", "odd"),
    [
        ("told_s = 1", {"told"}),
        ("def count_strangers(): ...", {"strangers"}),
        ("class Crumb: ...", {"crumb"}),
        ("self.untold = 0", {"untold"}),
        ("def f(taught): ...", {"taught"}),
        ("for one in rows: _found = one", {"one", "found"}),
        ("try: pass\nexcept OSError as found: kept_rows = 0", {"found"}),
        ('"""It is nobody\'s."""', {"nobodys"}),
        ('"""A number is no token."""', {"is no token"}),
        ('"""There is no token, and it is no longer waited for."""', set()),
        ('toldness = "told"', set()),
        ("size = 1  #\x20as told", {"told"}),
    ],
)
def test_odd_words_are_found(source: str, odd: set[str]):
    """In parts of identifiers, in docstrings and comments, as whole words."""
    assert odd == odd_words([*ast.walk(ast.parse(source))], source)


# What a docstring's first sentence does not begin with or hold: a clause in the place of a noun.
CLAUSES = re.compile(
    r"^(Return|Tell|Say|Yield|Give) (which|what|how|why|when|that|if)\b|^Tell whether\b"
    r"|\b(of which|what|whose|such|so many|of ours)\b",
    re.IGNORECASE,
)
FIRST_WORDS = 15


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring, up to a full stop, colon or semicolon."""
    return re.split(r"(?<=[.:;])\s", " ".join(docstring.split("\n\n", maxsplit=1)[0].split()))[0]


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_docstring_names_its_thing_first(package: str):
    """With a noun of the field, in at most 15 words, and no clause; docstrings of commands are help texts."""
    sentences = [
        (f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 1)}", first_sentence(docstring))
        for path in (REPOSITORY / package).rglob("*.py")
        if path.parent != REPOSITORY / "sidecar/cli" and path.name != "commands.py"  # help of commands
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (docstring := ast.get_docstring(node))
    ]
    odd = {place: text for place, text in sentences if CLAUSES.search(text) or len(text.split()) > FIRST_WORDS}
    assert {} == odd


@pytest.mark.parametrize("package", [*sorted(MAY_IMPORT), "tests"])
def test_the_code_speaks_the_fields_words(package: str):
    """No banned word."""
    odd = {
        str(path.relative_to(REPOSITORY)): odd_words(nodes(path), path.read_text(encoding="utf-8"))
        for path in (REPOSITORY / package).rglob("*.py")
    }
    assert {} == {path: words for path, words in odd.items() if words}


def test_a_module_is_named_for_what_it_is():
    """No drawer for everything."""
    assert [] == [module for module in MODULES if module.rpartition(".")[2] in BANNED_STEMS]


def test_every_module_and_public_function_says_what_it_is_for():
    """A module's docstring begins with a sentence; so does that of every public class."""
    bare = [module for module in MODULES if not (ast.get_docstring(parsed(MODULES[module])) or "").strip()]
    bare += [
        f"{module}.{node.name}"
        for module, path in MODULES.items()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert [] == bare


def texts() -> Iterator[tuple[Path, str]]:
    """Give every tracked file that is text."""
    for path in tracked():
        raw = path.read_bytes()
        if b"\0" not in raw[:8192]:
            yield path.relative_to(REPOSITORY), raw.decode(errors="replace")


def test_no_file_names_a_package_registry():
    """Where packages come from is decided where they are installed."""
    hosts = re.compile("|".join(rf"\b{re.escape(host)}\b" for host in REGISTRIES))
    assert [] == [f"{path}: {match[0]}" for path, text in texts() if (match := hosts.search(text))]


def test_no_file_names_a_place_of_one_machine():
    """Where somebody built this, or keeps a home, stands in no file."""
    places = "|".join(re.escape(f"/{first}{rest}") for first, rest in PLACES)
    named = re.compile(rf"(?<![\w.])(?:{places}|/home/\w+/|/Users/\w+/)")
    assert [] == [f"{path}: {match[0]}" for path, text in texts() if (match := named.search(text))]


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files_carry_hashes_and_no_address(name: str):
    """Each requirement is pinned, with at least one SHA-256; nothing says where to get it."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert [] == re.findall(r"\S*(?:://|--(?:extra-)?index-url|--find-links|--trusted-host)\S*", text)
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    rows = [row for row in joined.splitlines() if row.strip() and not row.lstrip().startswith("#")]
    assert rows
    for row in rows:
        assert re.match(r"[a-z0-9][a-z0-9.-]*==[^\s;]+( ;[^-]*)?( --hash=sha256:[0-9a-f]{64})+\s*$", row), row[:80]


def test_both_lock_files_agree():
    """What is needed to run has the same version where tests run."""
    pinned = []
    for name in LOCKS:
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        pinned.append(dict(re.findall(r"^([a-z0-9][a-z0-9.-]*)==(\S+)", text, flags=re.MULTILINE)))
    run, dev = pinned
    assert {} == {name: (version, dev.get(name)) for name, version in run.items() if dev.get(name, version) != version}


def test_every_direct_dependency_is_locked():
    """What pyproject.toml asks for stands in the lock."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = (REPOSITORY / "requirements.lock").read_text(encoding="utf-8")
    for wanted in project["dependencies"]:
        name = re.split(r"[<>=!~\[; ]", wanted)[0]
        assert re.search(rf"^{re.escape(name)}==", locked, flags=re.MULTILINE), name


def test_the_readmes_commands_are_targets():
    """`make demo` and `make test`, as the README shows them, and whatever else it makes."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    if not readme.strip():
        pytest.skip("README.md is empty")
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    pairs = re.findall(r"^\s*(?:\$ )?make ([a-z]+)\b|`make ([a-z]+)", readme, flags=re.MULTILINE)
    shown = {name for pair in pairs for name in pair if name}
    assert {"demo", "test"} <= shown
    assert shown <= targets


def test_the_continuous_integration_runs_the_readmes_test():
    """The decision whether something lands is `make test`, no other command, with everything installed that tests use.

    A failure to install is a failure, and so is a test that is skipped for want of it (`tests/skips.py`).
    """
    lines = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "exec make test" == lines[-1]
    assert {"set -euo pipefail", "export CI=true"} <= set(lines)
    assert [] == [line for line in lines if "||" in line]


def test_the_architecture_names_files_that_are_there():
    """Every path in docs/architecture.md exists, so that a newcomer finds what it speaks of."""
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(
        re.findall(
            r"`((?:rundir|loadgen|scraper|correlator|methodology|exporter|sidecar|simulator|twin|sidelight)/[\w./]*)`",
            text,
        )
    )
    assert len(named) > 40
    assert set() == {path for path in named if not (REPOSITORY / path).exists()}
