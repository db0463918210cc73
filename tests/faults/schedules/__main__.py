"""Play schedules, a case a line on standard input, in a process whose time is virtual; answer what is wrong with each.

python -m faults.schedules PLACE
"""

from __future__ import annotations

import sys

from faults.schedules.virtual_time import Time

CLOCK = Time()
CLOCK.install()  # before anything keeps a function of `time`

from faults.schedules.rows import answer_cases  # noqa: E402

sys.exit(answer_cases(CLOCK))
