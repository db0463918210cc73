"""An engine with known true queue and prefill times: the embedded default and the test bench."""
