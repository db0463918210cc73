"""The draft's generated reference workloads, with the appendix's numbers. None of them is read from a file.

Source: draft-gaikwad-llm-benchmarking-methodology-00, Reference Workloads and Reference Workload Specifications.
Where the draft leaves a number open, the choice is ours and stands in `ASSUMPTIONS`.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

from sidelight.loadgen.plan.workloads.distributions import Choice, Fixed, LogNormal, Normal, Percentiles, Uniform
from sidelight.loadgen.plan.workloads.mix import RequestClass, Sharing
from sidelight.loadgen.plan.workloads.request import WorkloadRequest

UNIFORM = "synthetic-uniform"
_IDS = 100_256
_ID_BITS = 17
_WORD_BITS = 32

SYSTEM_PROMPT = Sharing(count=1, tokens=Fixed(200), share=0.5)

# Lengths uniform over the range, which is all that the draft gives.
REPOSITORIES = Sharing(count=10, tokens=Uniform(512, 1024), share=0.8, zipf=1.5)
CODE_OUTPUT = LogNormal(4.0, 1.5, 1, 4096)
_LONG_TARGETS = (8192, 16_384, 32_768, 65_536, 131_072)
_QUESTION = (
    "\n\nQuestion: Using only the document above, describe in your own words what it says about the people, the places "
    "and the work that it mentions. Begin with the part that you think matters most, give the reasons for your choice, "
    "and name two sentences of the document that support it. Then say what the document leaves open, and what "
    "a reader would have to find out elsewhere before relying on it. Answer in full sentences, without a list, and do "
    "not repeat the question itself.\nAnswer:"
)

_CLASSES = (
    # Only for the report: its requests are those of `uniform_requests`.
    RequestClass(name=UNIFORM, input_tokens=Uniform(128, 512), output_tokens=Uniform(64, 256)),
    RequestClass(
        name="synthetic-skewed",
        input_tokens=LogNormal(5.5, 1.0, 32, 4096),
        output_tokens=LogNormal(4.5, 1.2, 16, 2048),
    ),
    # Of the user's message and of the reply: half of the messages carry the system prompt on top.
    RequestClass(
        name="conversation",
        input_tokens=Percentiles(((50, 156), (95, 892), (99, 2134)), 1, 32_768),
        output_tokens=Percentiles(((50, 234), (95, 789), (99, 1567)), 1, 8192),
        content="words",
        system=SYSTEM_PROMPT,
    ),
    RequestClass(
        name="code-completion",
        input_tokens=LogNormal(5.0, 1.0, 16, 4096),
        output_tokens=CODE_OUTPUT,
        content="code",
        prefixes=REPOSITORIES,
    ),
    RequestClass(
        name="long-context",
        input_tokens=Choice(_LONG_TARGETS, (1.0,) * len(_LONG_TARGETS)),
        output_tokens=Fixed(256),
        content="words",
        question=_QUESTION,
    ),
    # siclait's client: normal lengths, ids drawn from the whole vocabulary; it names no numbers.
    RequestClass(name="siclait", input_tokens=Normal(100, 20), output_tokens=Fixed(300)),
)
CLASSES = {traffic_class.name: traffic_class for traffic_class in _CLASSES}

ASSUMPTIONS = {
    "synthetic-uniform": "drawn by random.Random(seed), to the letter of the draft's pseudocode",
    "synthetic-skewed": "lengths are rounded to the nearest token; floor and cap gather what lies beyond them",
    "conversation": "the draft's length percentiles are those of the user's message and of the reply; the 200-token "
    "system prompt comes on top",
    "code-completion": "context lengths are uniform; one request in five has no repository context; output is held "
    "within 1 and 4096 tokens",
    "long-context": "the document is English words in sentences without meaning; no two documents begin alike",
    "siclait": "mean 100 and standard deviation 20 tokens, 300 output tokens: the source leaves them to its user",
}
STAND_IN_ASSUMPTIONS = {
    "conversation": "lengths through the draft's P50, P95 and P99; between and beyond them log-normal pieces; English "
    "words in sentences instead of conversations",
    "code-completion": "input lengths log-normal (mu 5.0, sigma 1.0, 16 to 4096), as the draft gives none; "
    "functions made from templates, not The Stack's",
}


def uniform_requests(*, seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests of synthetic-uniform without end, by the draft's pseudocode.

    To the letter of its appendix: `random.Random(seed)`, and the draws in its order. Input is Uniform(128, 512) tokens
    with ids in [0, 100255], output Uniform(64, 256); no system prompt, no shared prefix, temperature 0.
    """
    rng = random.Random(seed)
    while True:
        input_tokens = rng.randint(128, 512)
        max_tokens = rng.randint(64, 256)
        yield WorkloadRequest(
            workload_class=UNIFORM,
            token_ids=_draw_ids(rng, input_tokens),
            input_tokens=input_tokens,
            max_tokens=max_tokens,
        )


def _draw_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    """Return the results of `count` calls of rng.randint(0, 100255), several times faster.

    randint takes the upper 17 bits of one 32-bit word of the generator and draws again while they are too high. Many
    words come at once here, never more than are still missing, so that the generator stands where the calls leave it.
    """
    ids: list[int] = []
    while missing := count - len(ids):
        words = rng.getrandbits(_WORD_BITS * missing).to_bytes(4 * missing, "little")
        drawn = struct.unpack(f"<{missing}I", words)
        ids += [token_id for word in drawn if (token_id := word >> (_WORD_BITS - _ID_BITS)) < _IDS]
    return tuple(ids)
