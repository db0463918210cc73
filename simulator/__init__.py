"""An engine whose true queue and prefill times are known: the embedded default and the test bench."""
