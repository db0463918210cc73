"""A tokenizer.json on this machine, with the chat template beside it.

Both packages are extras: `tokenizers` reads the file, `jinja2` renders the template.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from sidelight.loadgen.plan.tokenizers import rendering
from sidelight.loadgen.plan.tokenizers.fitting import TokenizerError
from sidelight.loadgen.protocols.request import Prompt, messages_of
from sidelight.rundir.printable.masking import secret_variables

_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_EXTRA = "pip install 'sidelight[tokenizers]'"


class LocalTokenizer:
    """A model's own tokenizer (native, option A) from its tokenizer.json."""

    option = "A, native"

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json, or the one in a directory. Raises TokenizerError naming the file and the cure."""
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            import tokenizers  # noqa: PLC0415  # an extra, and 60 ms
        except ImportError as error:
            raise TokenizerError("tokenizer.package", f"{path}: needs the package tokenizers; {_EXTRA}") from error
        try:
            raw = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        except OSError as error:
            raise TokenizerError(
                "tokenizer.unreadable", f"{path}: {error.strerror}; give a tokenizer.json or its directory"
            ) from error
        # The binding raises plain Exception on what it cannot read.
        except Exception as error:
            raise TokenizerError(
                "tokenizer.unreadable", f"{path}: no tokenizer: {' '.join(str(error).split())}"
            ) from error
        # A file may ask for truncation or padding, which would falsify every count.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = path.resolve().parent.name if path.name == "tokenizer.json" else path.stem
        self.version = f"sha256 {hashlib.sha256(raw).hexdigest()[:16]}"
        self.vocab_size: int | None = self._tokenizer.get_vocab_size()
        self.source = str(path)
        self._directory = path.parent

    @cached_property
    def _chat(self) -> Template | str:
        return chat_template(self._directory)

    @property
    def template(self) -> bool:
        """Return whether there is a chat template that can be rendered."""
        return not self.why_no_template

    @property
    def why_no_template(self) -> str:
        """Return the reason why no chat template can be rendered, else an empty string."""
        return self._chat if isinstance(self._chat, str) else ""

    async def encode(self, text: str) -> list[int]:
        """Return token ids without the special tokens that the file would add."""
        return self._ids(text)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    async def count_chat(self, system: str, user: str) -> int:
        """Return tokens of a chat request after the chat template. Raises TokenizerError where there is none."""
        if isinstance(self._chat, str):
            raise TokenizerError("tokenizer.no-chat-template", f"{self.source}: no chat template: {self._chat}")
        return len(self._ids(self._chat.render(system, user)))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def chat_template(directory: Path) -> Template | str:
    """Return a renderer of the model's chat template, or the reason for its absence.

    It renders a system and a user text.

    The template is chat_template.jinja, else the `chat_template` of tokenizer_config.json (its "default" of several).
    """
    config: dict[str, Any] = {}
    source = directory / _TEMPLATE
    try:
        config = msgspec.json.decode((directory / _CONFIG).read_bytes(), type=dict[str, Any])
    except OSError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"{directory / _CONFIG}: {error}"
    try:
        template: object = source.read_text(encoding="utf-8")
    except OSError:
        template, source = config.get("chat_template"), directory / _CONFIG
    except UnicodeDecodeError as error:
        return f"{source}: {error}"
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        return f"neither {_TEMPLATE} nor a chat_template in {_CONFIG}"
    if find_spec("jinja2") is None:
        return f"it needs the package jinja2; {_EXTRA}"
    try:
        return Template(template, {key: _token(config.get(key)) for key in ("bos_token", "eos_token")}, source)
    except TokenizerError as error:
        return str(error)


def _token(value: object) -> str:
    """Return a special token's text. A configuration writes the token as text or as an object with the text in it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


class Template:
    """A chat template and the process that renders it, which ends with this object.

    All texts are rendered there: one that is quick with a short text may take long with another.
    """

    def __init__(self, template: str, tokens: dict[str, str], source: Path) -> None:
        """Start the process and compile the template there. Raises TokenizerError naming `source`."""
        self._source = source
        secret = frozenset(secret_variables(os.environ))
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-P", rendering.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name not in secret},
            start_new_session=True,  # Ctrl-C is ours
        )
        weakref.finalize(self, _end, self._process)
        self._texts, self._characters = 0, 0
        self._ask({"template": template, "context": {**tokens, "add_generation_prompt": True}})

    def render(self, system: str, user: str) -> str:
        """Return the text of a request. Raises TokenizerError, also where the template takes too much."""
        return self._ask({"messages": messages_of(Prompt(text=user, system=system))})

    def _ask(self, order: dict[str, Any]) -> str:
        stdin, stdout = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        line = json.dumps(order).encode() + b"\n"
        self._texts, self._characters = self._texts + 1, self._characters + len(line)
        with suppress(BrokenPipeError):
            stdin.write(line)
            stdin.flush()
        answer = json.loads(stdout.readline() or b"{}")
        if "text" not in answer:
            raise TokenizerError(
                "tokenizer.chat-template", f"the chat template: {answer.get('error') or self._death()} ({self._source})"
            )
        return str(answer["text"])

    def _death(self) -> str:
        """Return the reason for the end of the process."""
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            most_s = rendering.most_cpu_s(self._texts, self._characters)
            return f"it took more than {most_s} s of the processor's time, as a loop without an end does"
        if code == rendering.NO_MEMORY:
            return f"it took more than {rendering.MOST_BYTES // 1024**2} MiB of memory"
        return f"it ended the process that renders it (exit code {code})"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
