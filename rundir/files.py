"""Files of a run directory, which others may have made: only plain ones are read, and ours are replaced whole.

What is written goes where it was asked to and nowhere else, whatever links lie there; what is read ends.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO


class NotRegular(OSError):
    """What lies there is no plain file; `strerror` says what it is."""

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


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.readall()


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside its place and move it there, so that no reader, and no crash, ever leaves half of it.

    The draft is a new file of a name that cannot be guessed; a link at the file's own place is replaced, not followed.
    Raises OSError.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    draft = f".{path.name}.{secrets.token_hex(8)}.draft"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(draft, flags, 0o666, dir_fd=directory)
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
