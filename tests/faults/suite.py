"""All kinds of faults."""

from __future__ import annotations

from faults.clock import CLOCK
from faults.crash import CRASHES
from faults.differential import DIFFERENTIAL
from faults.disk import DISK
from faults.fuzz import FUZZ
from faults.intruder import INTRUDER
from faults.logs import LOG_FAULTS
from faults.network import NETWORK
from faults.simulated import SIMULATED
from faults.soak import SOAK
from faults.tables import TABLES
from faults.watches import WATCHES
from faults.wire import WIRE

_ALL = (
    *(CRASHES, WATCHES, CLOCK, SIMULATED, LOG_FAULTS, FUZZ, DIFFERENTIAL, WIRE, TABLES),
    *(NETWORK, DISK, INTRUDER, SOAK),
)
KINDS = {kind.name: kind for kind in _ALL}
# Of the time of a long run, how many parts each kind gets.
SHARES = {
    "crash": 4,
    "watch": 2,
    "clock": 2,
    "time": 4,
    "logs": 2,
    "fuzz": 2,
    "pages": 1,
    "wire": 1,
    "tables": 1,
    "network": 1,
    "disk": 2,
    "intruder": 2,
    "soak": 4,
}
