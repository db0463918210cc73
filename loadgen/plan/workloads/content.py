"""Prompt contents as token ids of cl100k_base, from a seeded generator. Each has exactly as many ids as requested.

random-tokens  ids drawn uniformly, as the draft's synthetic workloads have them; their text loses something
words          common English words in sentences; each is one token, so a text encodes to the ids it was made from
code           functions in Python, JavaScript or TypeScript, one language a piece, made from templates
repeat         one word over and over, as exo's atom
"""

from __future__ import annotations

from functools import cache

import numpy as np

from sidelight.loadgen.plan.tokenizers.reference import reference
from sidelight.rundir.columns import Ints

LANGUAGES = ("Python", "JavaScript", "TypeScript")
_PROGRAMS = ", ".join(LANGUAGES)
# What each is about, and in which language: what the draft wants stated of a workload's content.
CONTENTS = {
    "random-tokens": ("none: random tokens", "none"),
    "words": ("none: common words in sentences without meaning", "English"),
    "code": ("source code made from templates", _PROGRAMS),
    "repeat": ("none: one word over and over", "English"),
}

# The draft's highest id; those above are cl100k_base's special tokens.
_HIGHEST_ID = 100_255
_WORDS_A_SENTENCE = 12
_ATOM = " a"

_WORDS = """time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point home
water room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law car city community name president
team minute idea body information back parent face others level office door health person art war history
party result change morning reason research girl guy moment air teacher force education good new first
last long great little own other old big high different small large next early young important few public
bad same able the of and a to in he have it that for they with as not on she at by this we you do but
from or which one would all will there say who make when can more if no man out so go up get than into
could see know then some them only come think over also after use two how our well even want because any
give most us""".split()  # noqa: SIM905  # hundreds of quotes would hide the words

_NAMES = """user order item total price index cache token queue batch config result value record path node event state
task chunk block frame score limit offset buffer header client server request response session worker metric""".split()  # noqa: SIM905  # as above
_VERBS = "load save parse merge update count filter collect send read write check build find apply resolve".split()  # noqa: SIM905  # as above

_TEMPLATES = {
    "Python": '''def {verb}_{name}({other}, {third}=None):
    """{Verb} the {name} of each {other}."""
    if {third} is None:
        {third} = []
    for {name} in {other}:
        if not {name}.{third}:
            continue
        {third}.append({name}.{verb}({other}))
    return sorted({third}, key=lambda {name}: {name}.{other})

''',
    "JavaScript": """function {verb}{Name}({other}, {third} = []) {{
  // {Verb} the {name} of each {other}.
  for (const {name} of {other}) {{
    if (!{name}.{third}) {{
      continue;
    }}
    {third}.push({name}.{verb}({other}));
  }}
  return {third}.filter(({name}) => {name}.{other} !== undefined);
}}

""",
    "TypeScript": """export function {verb}{Name}({other}: {Other}[], {third}: Map<string, {Name}>): {Name}[] {{
  const found: {Name}[] = [];
  for (const {name} of {other}) {{
    const known = {third}.get({name}.id);
    if (known === undefined) {{
      throw new Error(`no {name} in {third}`);
    }}
    found.push({{ ...known, {verb}: true }});
  }}
  return found;
}}

""",
}
_FUNCTIONS_A_LANGUAGE = 128


def about_content(name: str) -> dict[str, str]:
    """Return the report's description of a content: its name, its domain and its language."""
    domain, language = CONTENTS[name]
    return {"content": name, "domain": domain, "language": language}


def token_ids(kind: str, tokens: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Return the token ids of one piece of content. Raises KeyError for a kind that is none of CONTENTS."""
    return tuple(_MAKERS[kind](tokens, rng).tolist())


def _random_tokens(tokens: int, rng: np.random.Generator) -> Ints:
    return rng.integers(0, _HIGHEST_ID, tokens, endpoint=True)


def _words(tokens: int, rng: np.random.Generator) -> Ints:
    words, stop = _word_ids()
    drawn = words[rng.integers(0, len(words), tokens)]
    # A piece ends in a word, so that the next one, which begins with a blank, joins without merging.
    drawn[_WORDS_A_SENTENCE : tokens - 1 : _WORDS_A_SENTENCE + 1] = stop
    return drawn


def _code(tokens: int, rng: np.random.Generator) -> Ints:
    functions = _function_ids(LANGUAGES[rng.integers(len(LANGUAGES))])
    shortest = min(map(len, functions))
    chosen = rng.integers(0, len(functions), tokens // shortest + 1)
    return np.concatenate([functions[at] for at in chosen])[:tokens]


def _repeat(tokens: int, _rng: np.random.Generator) -> Ints:
    return np.full(tokens, reference().ids(_ATOM)[0], np.int64)


_MAKERS = {"random-tokens": _random_tokens, "words": _words, "code": _code, "repeat": _repeat}


@cache
def _word_ids() -> tuple[Ints, int]:
    """Return the token ids of the words and of the full stop. Each word is taken with the blank before it."""
    ids = [reference().ids(f" {word}") for word in sorted(set(_WORDS))]
    return np.array([word_id for word_id, *more in ids if not more], np.int64), reference().ids(".")[0]


@cache
def _function_ids(language: str) -> tuple[Ints, ...]:
    """Return ids of functions of a language, always the same ones."""
    rng = np.random.default_rng(LANGUAGES.index(language))
    functions = []
    for _ in range(_FUNCTIONS_A_LANGUAGE):
        name, other, third = (_NAMES[at] for at in rng.permutation(len(_NAMES))[:3])
        verb = _VERBS[rng.integers(len(_VERBS))]
        text = _TEMPLATES[language].format(
            verb=verb, Verb=verb.title(), name=name, Name=name.title(), other=other, Other=other.title(), third=third
        )
        functions.append(np.array(reference().ids(text), np.int64))
    return tuple(functions)
