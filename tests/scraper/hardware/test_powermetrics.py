"""What macOS `powermetrics` writes, and the child process that writes it."""

from __future__ import annotations

import sys
import time
from math import isnan
from pathlib import Path

import pytest
from waiting import BOUND_S

from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware.powermetrics import Powermetrics, PowerSample, parse_plist, split_plists, start
from sidelight.scraper.hardware.records import HardwareRecord, SourceLostError

HEAD = b"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0">
"""
APPLE = (
    HEAD
    + b"""<dict>
<key>is_delta</key><true/>
<key>elapsed_ns</key><integer>1250000000</integer>
<key>hw_model</key><string>Mac14,12</string>
<key>timestamp</key><date>2026-01-22T21:07:07Z</date>
<key>thermal_pressure</key><string>Moderate</string>
<key>processor</key>
<dict>
<key>clusters</key><array><dict><key>name</key><string>E-Cluster</string><key>idle_ratio</key><real>0.9</real></dict></array>
<key>ane_energy</key><integer>25</integer><key>ane_power</key><real>20.0</real>
<key>cpu_energy</key><integer>5000</integer><key>cpu_power</key><real>4000.0</real>
<key>gpu_energy</key><integer>25000</integer><key>gpu_power</key><real>20000.0</real>
<key>combined_power</key><real>24020.0</real>
</dict>
<key>gpu</key><dict><key>freq_hz</key><real>1398.0</real><key>idle_ratio</key><real>0.25</real></dict>
</dict>
</plist>
"""
)
OLD = (
    HEAD
    + b"""<dict><key>elapsed_ns</key><integer>500000000</integer><key>processor</key><dict>
<key>cpu_energy</key><integer>640</integer><key>gpu_energy</key><integer>305</integer>
<key>package_energy</key><integer>1046</integer><key>combined_power</key><real>2092.0</real>
</dict></dict></plist>
"""
)
INTEL = (
    HEAD
    + b"""<dict><key>elapsed_ns</key><integer>1000000000</integer>
<key>processor</key><dict><key>package_watts</key><real>37.25</real><key>package_joules</key><real>37.25</real></dict>
</dict></plist>
"""
)
ECHO = (
    "import pathlib, sys, time; sys.stdout.buffer.write(pathlib.Path(sys.argv[1]).read_bytes()); sys.stdout.flush(); "
)


def test_a_plist_of_apple_silicon_has_each_part():
    """Milliwatts by part, the GPU's busy share from its idle one; the combined power would count them twice."""
    expected = PowerSample(
        elapsed_s=1.25,
        power_w={"gpu": 20.0, "cpu": 4.0, "ane": 0.02},
        gpu_busy_ratio=0.75,
        thermal_pressure="Moderate",
    )
    assert expected == parse_plist(APPLE)


def test_a_plist_with_energies_alone_is_divided_by_its_interval():
    """Millijoules of half a second are twice as many milliwatts."""
    assert {"cpu": 1.28, "gpu": 0.61} == pytest.approx(parse_plist(OLD).power_w)


def test_a_plist_of_an_intel_mac_has_the_package():
    """No parts, so the whole."""
    sample = parse_plist(INTEL)
    assert {"package": 37.25} == sample.power_w
    assert isnan(sample.gpu_busy_ratio)


@pytest.mark.parametrize("document", [b"", b"<plist", b"\0" * 8, HEAD + b"<array/></plist>", HEAD + b"<dict/></plist>"])
def test_what_is_no_sample_is_refused(document: bytes):
    """Torn, empty, another plist, or one without an interval: a ValueError and nothing else."""
    with pytest.raises(ValueError, match=r"plist|elapsed"):
        parse_plist(document)


def test_a_stream_of_plists_is_split_at_their_ends():
    """A NUL stands before each, so the last one is whole without it; what is torn waits for the rest."""
    stream = b"\0".join([APPLE, OLD, INTEL])
    for cut in (0, 5, len(APPLE), len(APPLE) + 1, len(stream) - 3):
        first, rest = split_plists(stream[:cut])
        second, rest = split_plists(rest + stream[cut:])
        assert [APPLE.strip(), OLD.strip(), INTEL.strip()] == first + second
        assert b"" == rest.strip()


def test_the_child_is_read_sample_by_sample(tmp_path: Path):
    """Energies add up to a counter; of two samples that came at once, the first ended where the second began."""
    (tmp_path / "stream").write_bytes(APPLE + b"\0" + APPLE)
    source = child(tmp_path, ECHO + "time.sleep(600)")
    try:
        records = read_some(source)
    finally:
        source.close()
    gpu = [record for record in records if record.device == "gpu"]
    assert [25.0, 50.0] == [record.energy_j for record in gpu]
    assert 1_250_000_000 == gpu[1].at_ns - gpu[0].at_ns
    assert ("GPU", "gpu", 20.0, 0.75, "Moderate") == (
        gpu[0].name,
        gpu[0].kind,
        gpu[0].power_w,
        gpu[0].utilisation_ratio,
        gpu[0].thermal_pressure,
    )


def test_a_child_that_ends_is_lost_with_its_last_message(tmp_path: Path):
    """As `powermetrics` does when it may not measure."""
    (tmp_path / "stream").write_bytes(b"")
    source = child(tmp_path, ECHO + "sys.exit('powermetrics must be invoked as the superuser')")
    with pytest.raises(SourceLostError, match="ended: powermetrics must be invoked as the superuser"):
        read_some(source)
    source.close()


def test_a_child_that_writes_something_else_is_lost(tmp_path: Path):
    """A plist without an interval is not what was asked for."""
    (tmp_path / "stream").write_bytes(HEAD + b"<dict/></plist>\n")
    source = child(tmp_path, ECHO + "time.sleep(600)")
    with pytest.raises(SourceLostError, match="no elapsed_ns"):
        read_some(source)
    source.close()


def test_a_program_that_is_not_there_is_absent(tmp_path: Path):
    """The reason names it."""
    missing = start([str(tmp_path / "powermetrics")])
    assert Missing(f"{tmp_path}/powermetrics cannot be started: No such file or directory") == missing


def child(directory: Path, script: str) -> Powermetrics:
    source = start([sys.executable, "-c", script, str(directory / "stream")])
    assert isinstance(source, Powermetrics)
    return source


def read_some(source: Powermetrics) -> tuple[HardwareRecord, ...]:
    """Read until there is something; the child has twenty seconds to start."""
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        if records := source.read(0):
            return records
    pytest.fail("the child wrote nothing")
