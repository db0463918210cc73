"""The process that renders a chat template: a line of JSON in, a line out, within limits of memory and time.

A template is a program that comes with a model: its sandbox keeps it from files and from us, not from a loop without an
end. Run as a script, which saves the imports of our packages.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from typing import Any

MOST_BYTES = 512 * 1024**2
_LEAST_CPU_S = 2  # of which Python and jinja2 take a tenth; more for each text, of which a usual one takes 0.1 ms
NO_MEMORY = 3  # exit code
_TEXTS_PER_S = 100
_CHARACTERS_PER_S = 500_000
# What a template does wrong is raised as Python has it.
_OF_TEMPLATES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def main() -> None:
    """Compile the template of the first line, then render the messages of each further line."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS limits no address space
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    _allow(_LEAST_CPU_S)
    from jinja2 import TemplateError  # noqa: PLC0415  # an extra, and not for who imports the limits

    compiled, context, texts, characters = None, {}, 0, 0
    for line in sys.stdin:
        order = json.loads(line)
        texts, characters = texts + 1, characters + len(line)
        _allow(most_cpu_s(texts, characters))
        try:
            if compiled is None:
                compiled, context = _compiled(order["template"]), order["context"]
                answer = {"text": ""}
            else:
                answer = {"text": compiled.render(messages=order["messages"], **context)}
        except MemoryError:
            sys.exit(NO_MEMORY)
        except (TemplateError, *_OF_TEMPLATES) as error:
            answer = {"error": str(error) or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def most_cpu_s(texts: int, characters: int) -> int:
    """Return the limit on processor time for rendering `texts` lines, in s.

    `characters` is the number of characters in all of them.
    """
    return _LEAST_CPU_S + texts // _TEXTS_PER_S + characters // _CHARACTERS_PER_S


def _allow(cpu_s: int) -> None:
    """Limit the processor time of this process: SIGXCPU ends it after `cpu_s` seconds."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _compiled(template: str) -> Any:
    from jinja2 import TemplateError  # noqa: PLC0415  # as above
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415  # as above

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # As the models' authors expect it: blocks leave no lines behind, and a template may refuse an order of roles.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda _form: "2025-01-01"  # the same tokens every day
    return environment.from_string(template)


if __name__ == "__main__":
    main()
