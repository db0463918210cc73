"""The hardware section of the report, from summaries as the derivation makes them."""

from __future__ import annotations

from typing import Any

from sidelight.exporter.report.tables.energy import energy_section
from sidelight.exporter.text import without_padding
from sidelight.scraper.hardware.records import HardwareAbsence, HardwareLogRecord, HardwareRecord
from sidelight.scraper.hardware.summary import Hardware, hardware_summary
from sidelight.scraper.window.window import Window

SECOND = 1_000_000_000
WINDOW = Window(start_ns=0, end_ns=10 * SECOND)
ABSENT = HardwareAbsence(at_ns=0, source="rapl", reason="energy_uj is readable by root only")


def printed(hardware: Hardware) -> str:
    return without_padding(energy_section(hardware)).strip()


def gpu(at_s: int, **values: Any) -> HardwareRecord:
    return HardwareRecord(
        at_ns=at_s * SECOND, source="nvml", device="GPU-1", name="GPU 0 NVIDIA L40S", kind="gpu", **values
    )


def test_each_device_has_a_row_and_tokens_have_a_price():
    """Joules, watts, how busy, how hot; then tokens per joule; then what was absent."""
    records: list[HardwareLogRecord] = [
        ABSENT,
        *(gpu(s, power_w=300.0, utilisation_ratio=0.83, temperature_c=61.0) for s in range(11)),
    ]
    text = printed(hardware_summary(records, window=WINDOW, output_tokens=1500))
    row = next(line for line in text.splitlines() if line.strip().startswith("GPU 0 NVIDIA L40S"))
    assert ["3,000", "300", "300", "83", "%", "61"] == row.split()[4:]
    assert "0.50 tokens/J (2 J a token) by GPU" in text
    assert "Energy over 10.0 s of the window, by trapezoid." in text
    assert "rapl: energy_uj is readable by root only" in text


def test_where_nothing_was_measured_there_is_no_section():
    """It was not asked for; the reasons, which can be long, stand in the summary."""
    assert "" == printed(hardware_summary([ABSENT], window=WINDOW, output_tokens=1500))


def test_what_is_not_known_of_a_device_stands_beside_it():
    """A GPU without power readings has a row all the same, and there are no tokens per joule."""
    text = printed(hardware_summary([gpu(s, temperature_c=50.0) for s in range(11)], window=WINDOW, output_tokens=1500))
    assert "it reports no power" in text
    assert "No tokens per joule: GPU 0 NVIDIA L40S: it reports no power." in text
