"""What to send and when: arrivals, workloads, tokenizers, and the fitted requests that the workers read."""
