"""Play schedules in a process whose time is virtual: a case a line on standard input, of which what is wrong is
answered, or with MINUTES a watch that goes on up to the last of them (`soaking`).

python -m faults.schedules PLACE [MINUTE ...]
"""

from __future__ import annotations

import sys

from faults.schedules.virtual_time import Time

CLOCK = Time()
CLOCK.install()  # before anything keeps a function of `time`

from faults.schedules.rows import answer_cases  # noqa: E402
from faults.schedules.soaking import answer_minutes  # noqa: E402

sys.exit(answer_minutes(CLOCK, [*map(int, sys.argv[2:])]) if sys.argv[2:] else answer_cases(CLOCK))
