"""Files of a run directory, which others may have made: only plain ones are read, and ours are replaced whole.

What is written goes where it was asked to and nowhere else, whatever links lie there; what is read ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

MOST_BYTES = 64 * 1024 * 1024  # of a file that is read at once


class NotRegular(OSError):
    """A path that is not a plain file; `strerror` says what it is."""

    strerror: str


class LockHeld(OSError):
    """Another process holds a lock; `strerror` names it."""

    strerror: str


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a file for reading, without a buffer.

    Raises NotRegular, since a link may lead anywhere and a FIFO or a device never ends; OSError for what is not there.
    """
    try:
        # Opening a FIFO would otherwise wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegular(errno.ELOOP, "is a link, and links are not followed", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegular(errno.EINVAL, "is not a regular file", os.fspath(path))
    return FileIO(fd)


def read_regular(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raises OSError as `open_regular` does, and above the limit."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"is larger than {most_bytes} bytes", os.fspath(path))
        return file.readall()


def require_regular(path: Path) -> None:
    """Raise OSError as `open_regular` does where anything lies at the place of a file."""
    with suppress(FileNotFoundError):
        open_regular(path).close()


def require_directory(path: Path) -> None:
    """Raise NotRegular for a path that is not a directory: a link may lead anywhere."""
    if path.is_symlink():
        raise NotRegular(errno.ELOOP, "is a link, and links are not followed", os.fspath(path))
    if path.exists() and not path.is_dir():
        raise NotRegular(errno.ENOTDIR, "is not a directory", os.fspath(path))


def mode_in(directory: os.stat_result) -> int:
    """Return the mode of a new file: who may read the directory may read it."""
    return 0o666 & directory.st_mode


def make_directory(path: Path) -> None:
    """Make a directory with the readers of its parent. Raises OSError as `require_directory` does."""
    require_directory(path)
    path.mkdir(mode=0o777 & path.parent.stat().st_mode, exist_ok=True)


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for writing; a new one is private to its owner.

    Whatever the umask: it may hold prompts and secrets. `flags` are added, as O_APPEND. Returns the descriptor, the
    caller's to close. Raises OSError.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)


def sync(path: Path) -> None:
    """Bring a file or a directory to the disk, whichever process wrote it. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file atomically.

    It is written beside its place and moved there, so that no reader ever sees half of it, and no crash leaves half of
    it.

    The draft is a new file of a name that cannot be guessed; a link at the file's own place is replaced, not followed.
    Who may read the directory may read the file. Raises OSError, NotRegular where a device or a FIFO is there.
    """
    with suppress(FileNotFoundError):
        if not (stat.S_ISREG(mode := os.lstat(path).st_mode) or stat.S_ISLNK(mode)):
            raise NotRegular(errno.EINVAL, "is not a regular file", os.fspath(path))
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    draft = f".{path.name}.{secrets.token_hex(8)}.draft"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(draft, flags, mode_in(os.fstat(directory)), dir_fd=directory)
        try:
            with os.fdopen(fd, "wb") as file:
                write(file)
                file.flush()
                os.fsync(fd)
            os.rename(draft, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=directory)
            raise
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock file with this process's id until the block or process ends.

    Where a file system has no locks, every process holds it. Raises Held, and OSError where there can be no such file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with FileIO(os.open(path, flags, mode_in(path.parent.stat())), "r+") as file:
        if not _locked(file, fcntl.LOCK_EX):
            raise LockHeld(errno.EWOULDBLOCK, f"process {_pid(file)} holds it", os.fspath(path))
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        yield


def holder(path: Path) -> str:
    """Return the id of the process that holds a lock file, empty where none does."""
    try:
        with open_regular(path) as file:
            return "" if _locked(file, fcntl.LOCK_SH) else _pid(file)
    except OSError:
        return ""


def _locked(file: FileIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        pass
    return True


def _pid(file: FileIO) -> str:
    content = file.read(20).decode("ascii", "replace")
    return content if content.isdecimal() else "of an unknown id"
