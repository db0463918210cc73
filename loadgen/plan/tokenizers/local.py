"""A tokenizer.json on this machine, with the chat template beside it.

Both packages are extras: `tokenizers` reads the file, `jinja2` renders the template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgen.plan.tokenizers.fitting import TokenizerError
from loadgen.protocols.request import Prompt, messages_of

_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_EXTRA = "pip install 'sidelight[tokenizers]'"

Render = Callable[[str, str], str]

# A template is a program: what it does wrong is raised as Python has it.
_OF_TEMPLATES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


class LocalTokenizer:
    """A model's own tokenizer (native, option A) from its tokenizer.json.

    template      whether a chat template was found that can be rendered
    why_no_template  else why not
    """

    option = "A, native"

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json, or the one in a directory. Raises TokenizerError naming the file and the cure."""
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            import tokenizers  # noqa: PLC0415  # an extra, and 60 ms
        except ImportError as error:
            raise TokenizerError(f"{path}: needs the package tokenizers; {_EXTRA}") from error
        try:
            raw = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror}; give a tokenizer.json or its directory") from error
        # The binding raises plain Exception on what it cannot read.
        except Exception as error:
            raise TokenizerError(f"{path}: no tokenizer: {' '.join(str(error).split())}") from error
        # A file may ask for truncation or padding, which would falsify every count.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = path.resolve().parent.name if path.name == "tokenizer.json" else path.stem
        self.version = f"sha256 {hashlib.sha256(raw).hexdigest()[:16]}"
        self.vocab_size: int | None = self._tokenizer.get_vocab_size()
        self.source = str(path)
        rendered = chat_template(path.parent)
        self._render = None if isinstance(rendered, str) else rendered
        self.template = self._render is not None
        self.why_no_template = rendered if isinstance(rendered, str) else ""

    async def encode(self, text: str) -> list[int]:
        """Return token ids without the special tokens that the file would add."""
        return self._ids(text)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    async def count_chat(self, system: str, user: str) -> int:
        """Return tokens of a chat request after the chat template. Raises TokenizerError where there is none."""
        if self._render is None:
            raise TokenizerError(f"{self.source}: no chat template: {self.why_no_template}")
        return len(self._ids(self._render(system, user)))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def chat_template(directory: Path) -> Render | str:
    """Return what renders a system and a user text by the model's chat template, or why there is nothing.

    The template is chat_template.jinja, else the `chat_template` of tokenizer_config.json (its "default" of several).
    """
    config: dict[str, Any] = {}
    try:
        config = msgspec.json.decode((directory / _CONFIG).read_bytes(), type=dict[str, Any])
    except OSError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"{directory / _CONFIG}: {error}"
    try:
        template: object = (directory / _TEMPLATE).read_text(encoding="utf-8")
    except OSError:
        template = config.get("chat_template")
    except UnicodeDecodeError as error:
        return f"{directory / _TEMPLATE}: {error}"
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        return f"neither {_TEMPLATE} nor a chat_template in {_CONFIG}"
    return _renderer(template, {key: _token(config.get(key)) for key in ("bos_token", "eos_token")})


def _token(value: object) -> str:
    """Return a special token, which a configuration writes as text or as an object with the text in it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _renderer(template: str, tokens: dict[str, str]) -> Render | str:
    try:
        from jinja2 import TemplateError  # noqa: PLC0415  # an extra
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415  # as above
    except ImportError:
        return f"it needs the package jinja2; {_EXTRA}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # As the models' authors expect it: blocks leave no lines behind, and a template may refuse an order of roles.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda _form: "2025-01-01"  # the same tokens every day
    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        return f"the template: {error}"

    def render(system: str, user: str) -> str:
        messages = messages_of(Prompt(text=user, system=system))
        try:
            return compiled.render(messages=messages, add_generation_prompt=True, **tokens)
        except (TemplateError, *_OF_TEMPLATES) as error:
            raise TokenizerError(f"the chat template: {str(error) or type(error).__name__}") from error

    return render
